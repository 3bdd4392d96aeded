"""Receipts in the store: written last and once per run, transaction and stage; read only in canonical form."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from pydantic import ValidationError

from longstraw_core.artifacts.outputs import missing_outputs
from longstraw_core.artifacts.signing import MEDIA_TYPE_ENVELOPE
from longstraw_core.artifacts.store import AlreadyPublished, Store
from longstraw_core.artifacts.trees import first_complaint
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json, sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_RECEIPT, Descriptor
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.receipts import ReceiptPredicate, StageName, StageReceipt

RUNS_PREFIX = "runs/"
_STAGES = "|".join(get_args(StageName))
_RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RECEIPT_NAME = re.compile(rf"runs/(?P<run>{_RUN})/(?P<transaction>[0-9]{{4}})/(?P<stage>{_STAGES})/receipt\.json")
_PARTS_OF_RECEIPT_NAME = 5
_ENVELOPE = "/receipt.dsse.json"
_STAGE_BY_NAME: dict[str, StageName] = {stage: stage for stage in get_args(StageName)}


@dataclass(frozen=True, slots=True)
class ReceiptPlace:
    """Where a receipt belongs: run, transaction (from 1) and stage."""

    run: str
    transaction: int
    stage: StageName

    @property
    def name(self) -> str:
        """Object name in the store."""
        return receipt_name(self.run, self.transaction, self.stage)


def receipt_name(run: str, transaction: int, stage: StageName) -> str:
    """Object name of a receipt: `runs/<run>/<transaction, 4 digits>/<stage>/receipt.json`.

    Raises:
        SpecError: the run's name has characters outside `A-Za-z0-9._-`, or the transaction is not in 1..9999.
    """
    if not re.fullmatch(_RUN, run):
        raise SpecError(f"run name {run!r} must be 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
    if not 1 <= transaction <= 9999:
        raise SpecError(f"transaction {transaction} must be between 1 and 9999")
    return f"{RUNS_PREFIX}{run}/{transaction:04d}/{stage}/receipt.json"


def place_of(name: str) -> ReceiptPlace | None:
    """Read a receipt's place from its object name; None when the name is not one of a receipt."""
    match = _RECEIPT_NAME.fullmatch(name)
    if match is None or match["transaction"] == "0000":
        return None
    return ReceiptPlace(match["run"], int(match["transaction"]), _STAGE_BY_NAME[match["stage"]])


def split_receipt_uri(uri: str) -> tuple[str, ReceiptPlace | None]:
    """Split the URI of a receipt into its store's URI and its place; any other URI comes back whole."""
    # counted from the end: prefixes and runs may be called `runs` too
    parts = uri.rsplit("/", _PARTS_OF_RECEIPT_NAME)
    place = place_of("/".join(parts[1:]))
    return (parts[0], place) if place is not None else (uri, None)


def envelope_name(receipt: str) -> str:
    """Object name of the signature of the receipt of this name, beside it."""
    return receipt.removesuffix("/receipt.json") + _ENVELOPE


def receipt_of_envelope(name: str) -> str | None:
    """Name of the receipt that an object signs; None when its name is not one of a signature."""
    receipt = name.removesuffix(_ENVELOPE) + "/receipt.json"
    return receipt if name.endswith(_ENVELOPE) and place_of(receipt) is not None else None


def write_receipt(store: Store, predicate: ReceiptPredicate) -> Descriptor:
    """Publish a stage's receipt and return its descriptor; call it last, after every output is stored.

    Writing the same receipt again succeeds. With a signing key the signature is stored first, so that no receipt of a
    signed run is ever seen without one; a signature that a killed writer left is completed with the receipt it is of.

    Raises:
        AlreadyPublished: this stage already has another receipt; read that one with `read_receipt`.
        IntegrityError: an output that the receipt claims, or a file of one that is a tree, is not in the store.
        SpecError: the receipt cannot be written as it is (for instance an input key of unknown form), or there is a
            verify key and nothing to sign with.
    """
    store.keys.check_can_write()
    for key in predicate.inputs:
        parse_input_key(key)
    if missing := missing_outputs(store, predicate.outputs):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise IntegrityError(
            f"receipt of {predicate.stage}: {missing[0]} is not in the store{more}; put it first, then run again"
        )
    try:
        receipt = StageReceipt.for_predicate(predicate)
    except ValidationError as error:
        raise SpecError(f"receipt of {predicate.stage}: {first_complaint(error)}") from error
    name = receipt_name(predicate.run, predicate.transaction, predicate.stage)
    content = canonical_json(receipt)
    if store.keys.signing is not None:
        content = _publish_signature(store, name, content)
    return store.create_object(name, content, MEDIA_TYPE_RECEIPT)


def _publish_signature(store: Store, name: str, content: bytes) -> bytes:
    """Store the signature of receipt bytes; return the bytes to publish: these, or those signed here before."""
    try:
        store.create_object(envelope_name(name), store.keys.sign(content), MEDIA_TYPE_ENVELOPE)
    except AlreadyPublished as error:
        signed = store.keys.check(store.get_bytes(error.published), name=envelope_name(name))
        if missing := missing_outputs(store, parse_receipt(signed, name=name).predicate.outputs):
            raise IntegrityError(
                f"{envelope_name(name)} signs a receipt whose {missing[0]} is not in the store; delete it"
            ) from error
        return signed
    return content


def check_signature(store: Store, name: str, content: bytes) -> None:
    """Raise IntegrityError unless the receipt of this name and these bytes is signed by the store's verify key."""
    envelope = envelope_name(name)
    if not store.exists(envelope):
        raise IntegrityError(f"{name} is not signed ({envelope} is missing); this run accepts signed receipts only")
    signed = store.keys.check(store.get_bytes(store.describe_object(envelope, MEDIA_TYPE_ENVELOPE)), name=envelope)
    if signed != content:
        raise IntegrityError(f"{envelope} signs another receipt than the one stored at {name}; do not use it")


def find_receipt(store: Store, run: str, transaction: int, stage: StageName) -> Descriptor | None:
    """Descriptor of a stage's receipt as it is stored now, or None when the stage has not finished."""
    name = receipt_name(run, transaction, stage)
    return store.describe_object(name, MEDIA_TYPE_RECEIPT) if store.exists(name) else None


def read_receipt(store: Store, descriptor: Descriptor) -> StageReceipt:
    """Return the verified receipt that a descriptor points to.

    Raises:
        IntegrityError: it is missing, its digest differs, its JSON is not canonical, it is no in-toto Statement of a
            stage, it says that it belongs to another run, transaction or stage than its name, or, where a verify key is
            set, that key did not sign it.
    """
    content = store.get_bytes(descriptor)
    receipt = parse_receipt(content, name=descriptor.uri)
    if store.keys.verify is not None:
        check_signature(store, descriptor.uri, content)
    return receipt


def parse_receipt(content: bytes, *, name: str, expected_digest: str | None = None) -> StageReceipt:
    """Read receipt bytes; `name` is the object name they were stored under. Raises like `read_receipt`."""
    receipt = parse_statement(content, name=name, expected_digest=expected_digest)
    place = place_of(name)
    claimed = _place_claimed(receipt)
    if place is None or place != claimed:
        raise IntegrityError(
            f"{name}: receipt says it belongs to run {claimed.run!r}, transaction {claimed.transaction}, stage "
            f"{claimed.stage}; do not use it"
        )
    return receipt


def parse_statement(content: bytes, *, name: str, expected_digest: str | None = None) -> StageReceipt:
    """Read receipt bytes without asking where they were stored; see `parse_receipt`."""
    observed = sha256_digest(content)
    if expected_digest is not None and observed != expected_digest:
        raise IntegrityError(f"{name}: expected {expected_digest}, observed {observed}; do not use it")
    value = parse_canonical_json(content, name=name)
    try:
        return StageReceipt.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a stage receipt: {first_complaint(error)}") from error


def list_receipts(store: Store, run: str | None = None) -> Iterator[ReceiptPlace]:
    """Yield the place of every receipt in the store, or of one run, in order of name."""
    for name in store.list_names(RUNS_PREFIX if run is None else f"{RUNS_PREFIX}{run}/"):
        place = place_of(name)
        if place is not None:
            yield place


@dataclass(frozen=True, slots=True)
class InputKey:
    """The parsed key of a receipt's `inputs`."""

    kind: str
    """`receipt`, `output` or `external`."""
    stage: StageName | None
    name: str
    """Output name, or the name of an external input; empty for a receipt."""
    previous: bool
    """Whether it belongs to the transaction before."""


def parse_input_key(key: str) -> InputKey:
    """Parse `receipt:<stage>`, `<stage>/<output>` or `external:<name>`.

    The first two may begin with `previous:`, which means the transaction before in the same run.

    Raises:
        SpecError: the key has none of these forms.
    """
    previous = key.startswith("previous:")
    rest = key.removeprefix("previous:")
    if not previous and rest.startswith("external:") and len(rest) > len("external:"):
        return InputKey("external", None, rest.removeprefix("external:"), previous=False)
    if rest.startswith("receipt:") and rest.removeprefix("receipt:") in _STAGE_BY_NAME:
        return InputKey("receipt", _STAGE_BY_NAME[rest.removeprefix("receipt:")], "", previous)
    stage, slash, output = rest.partition("/")
    if slash and output and stage in _STAGE_BY_NAME:
        return InputKey("output", _STAGE_BY_NAME[stage], output, previous)
    raise SpecError(
        f"input key {key!r} must be 'receipt:<stage>', '<stage>/<output>' (both may begin with 'previous:') or "
        "'external:<name>'"
    )


def _place_claimed(receipt: StageReceipt) -> ReceiptPlace:
    predicate = receipt.predicate
    return ReceiptPlace(predicate.run, predicate.transaction, predicate.stage)

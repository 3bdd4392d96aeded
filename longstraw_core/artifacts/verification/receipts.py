"""Reads a store's receipts and their signatures for a verification; whatever else lies among them is a fault."""

from dataclasses import dataclass, field

from longstraw_core.artifacts.finished_work import place_of_finished
from longstraw_core.artifacts.receipts import (
    RUNS_PREFIX,
    ReceiptPlace,
    check_signature,
    envelope_name,
    parse_statement,
    place_of,
    receipt_name,
    receipt_of_envelope,
)
from longstraw_core.artifacts.signing import read_envelope
from longstraw_core.artifacts.verification.reader import ObjectReader, shown_path
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_RECEIPT, Descriptor
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.receipts import StageReceipt


@dataclass(frozen=True, slots=True)
class KnownReceipt:
    """A receipt that could be read, with the descriptor of its bytes."""

    receipt: StageReceipt
    descriptor: Descriptor

    @property
    def digest(self) -> str:
        """Digest of its bytes."""
        return self.descriptor.digest


@dataclass(slots=True)
class ReceiptReader:
    """The receipts that a verification has read so far."""

    reader: ObjectReader
    known: dict[ReceiptPlace, KnownReceipt] = field(default_factory=dict[ReceiptPlace, KnownReceipt])
    runs: set[str] = field(default_factory=set[str])
    """Runs whose receipts were read, or asked for."""
    looked_for: set[ReceiptPlace] = field(default_factory=set[ReceiptPlace])
    """Receipts that were looked for once more, or read and found unusable."""

    def read(self, run: str | None) -> None:
        """Read every receipt of a run, or of the store, and its signature."""
        if run is not None:
            self.runs.add(run)
        envelopes: set[str] = set()
        prefix = RUNS_PREFIX if run is None else receipt_name(run, 1, "audit_data").partition("/0001/")[0] + "/"
        for found in self.reader.found(prefix):
            if found.kind != "file":
                self.reader.not_a_file(found)
            elif (signed := receipt_of_envelope(found.path)) is not None:
                envelopes.add(signed)
            elif place_of_finished(found.path) is not None:
                self.reader.report.unreferenced.append(found.path)
            elif (place := place_of(found.path)) is None:
                shown = shown_path(found.path)
                self.reader.fault("extra", shown, "nothing", "a file", f"{shown} is no receipt: remove it")
            else:
                self._read_one(found.path, place, envelopes)
        self.reader.report.unreferenced.extend(envelope_name(name) for name in sorted(envelopes))

    def look_again(self, place: ReceiptPlace) -> KnownReceipt | None:
        """A receipt that a later one names but the listing did not: a run that goes on may have written both since."""
        if place not in self.known and place not in self.looked_for:
            self.looked_for.add(place)
            if self.reader.store.exists(place.name):
                signed = self.reader.store.exists(envelope_name(place.name))
                self._read_one(place.name, place, {place.name} if signed else set())
        return self.known.get(place)

    def _read_one(self, name: str, place: ReceiptPlace, envelopes: set[str]) -> None:
        content = self.reader.read(name, "a receipt")
        if content is None:
            return
        self.looked_for.add(place)
        self.reader.report.receipts += 1
        self.reader.report.bytes += len(content)
        try:
            receipt = parse_statement(content, name=name)
        except IntegrityError as error:
            self.reader.fault("malformed", name, "a canonical stage receipt", sha256_digest(content), str(error))
            return
        claimed = _name_claimed(receipt)
        if claimed != name:
            message = f"this receipt says it belongs at {claimed}: replayed?"
            self.reader.fault("misplaced", name, name, claimed, message)
            return
        stored = Descriptor(uri=name, digest=sha256_digest(content), size=len(content), media_type=MEDIA_TYPE_RECEIPT)
        self.known[place] = KnownReceipt(receipt, stored)
        self.runs.add(place.run)
        self._check_signature(name, content, signed=name in envelopes)
        envelopes.discard(name)

    def _check_signature(self, name: str, content: bytes, *, signed: bool) -> None:
        """With a verify key it must have signed; without one, a signature must at least be of this receipt."""
        envelope = envelope_name(name)
        try:
            if self.reader.store.keys.verify is not None:
                check_signature(self.reader.store, name, content)
            elif signed:
                stored = self.reader.read(envelope, "a signature")
                if stored is None:
                    return
                payload, _ = read_envelope(stored, name=envelope)
                if payload != content:
                    raise IntegrityError(f"{envelope} signs another receipt than the one stored at {name}")
                self.reader.report.unchecked.append(f"{envelope}: no verify key was given")
        except IntegrityError as error:
            observed = "another" if signed else "none"
            self.reader.fault("signature", name, "the expected key's signature", observed, str(error))


def _name_claimed(receipt: StageReceipt) -> str:
    """Object name under which a receipt says it belongs; its raw fields when they cannot make a name."""
    predicate = receipt.predicate
    try:
        return receipt_name(predicate.run, predicate.transaction, predicate.stage)
    except SpecError:
        return f"run {predicate.run!r} transaction {predicate.transaction} stage {predicate.stage}"

"""What a long stage has finished before its receipt exists, so that the same stage started again goes on from there.

A part is an object `runs/<run>/<transaction>/<stage>/finished/<part>.jsonl`. It counts only for an execution of the
same identity and with the digest that its first line states. When the receipt is written all parts are deleted.
"""

import re
from typing import Literal

from pydantic import ValidationError

from longstraw_core.artifacts.receipts import ReceiptPlace, place_of, receipt_name
from longstraw_core.artifacts.store import AlreadyPublished, Store
from longstraw_core.spec.canonical import canonical_json, sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON_LINES
from longstraw_core.spec.model import Sha256, StrictModel
from longstraw_core.spec.receipts import StageName

_PART = re.compile(r"(?P<stage>runs/.+)/finished/[0-9]{6}\.jsonl")


class FinishedPart(StrictModel):
    """The first line of a part; the content follows it."""

    kind: Literal["longstraw.finished-part/1"] = "longstraw.finished-part/1"
    identity: Sha256
    """Digest of everything that decides the content."""
    content: Sha256
    """Digest of the content."""


def finished_name(run: str, transaction: int, stage: StageName, number: int) -> str:
    """Object name of part `number` (from 0)."""
    return f"{_prefix(run, transaction, stage)}{number:06d}.jsonl"


def place_of_finished(name: str) -> ReceiptPlace | None:
    """The stage that an object is a finished part of; None when its name is not one of a part."""
    match = _PART.fullmatch(name)
    return None if match is None else place_of(f"{match['stage']}/receipt.json")


def put_finished(store: Store, name: str, identity: str, content: bytes) -> None:
    """Store a part; one that another execution left under this name is replaced."""
    header = canonical_json(FinishedPart(identity=identity, content=sha256_digest(content)))
    part = header + b"\n" + content
    try:
        store.create_object(name, part, MEDIA_TYPE_JSON_LINES)
    except AlreadyPublished:
        store.delete_object(name)
        store.create_object(name, part, MEDIA_TYPE_JSON_LINES)


def get_finished(store: Store, name: str, identity: str) -> bytes | None:
    """Return the verified content of a part; None when there is none of this identity, or only a damaged one."""
    if not store.exists(name):
        return None
    header, _, content = store.get_bytes(store.describe_object(name, MEDIA_TYPE_JSON_LINES)).partition(b"\n")
    try:
        part = FinishedPart.model_validate_json(header)
    except ValidationError:
        return None
    return content if part.identity == identity and part.content == sha256_digest(content) else None


def clear_finished_work(store: Store, run: str, transaction: int, stage: StageName) -> None:
    """Delete all parts of a stage whose receipt is written."""
    for name in store.list_names(_prefix(run, transaction, stage)):
        store.delete_object(name)


def _prefix(run: str, transaction: int, stage: StageName) -> str:
    return receipt_name(run, transaction, stage).removesuffix("receipt.json") + "finished/"

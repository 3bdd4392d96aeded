"""Canonical JSON (RFC 8785): one byte string per value, so that digests of JSON mean something."""

import hashlib
import json
from typing import Any

import rfc8785
from pydantic import BaseModel

from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.model import MAX_JSON_INTEGER


def canonical_json(value: Any) -> bytes:
    """Return the RFC 8785 bytes of a model or of plain JSON types.

    Raises:
        SpecError: an integer is beyond ±(2^53 − 1), a number is not finite or a type has no JSON form.
    """
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    try:
        return rfc8785.dumps(plain)
    except ValueError as error:  # rfc8785's own errors, and its encoding error for a key with a lone surrogate
        raise SpecError(f"value cannot be written as canonical JSON: {error}") from error


def sha256_digest(content: bytes) -> str:
    """Return `sha256:<hex>` of `content`."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _integer_or_float(digits: str) -> int | float:
    """Read digits beyond ±(2^53 − 1) as a float, which is how RFC 8785 writes floats below 1e21.

    An integer that a float cannot hold then fails the comparison with the canonical bytes, and one that it can hold is
    refused by every integer field, which are strict.
    """
    return int(digits) if len(digits) <= 17 and abs(int(digits)) <= MAX_JSON_INTEGER else float(digits)


def parse_canonical_json(content: bytes, *, name: str) -> Any:
    """Parse bytes that must already be canonical.

    Raises:
        IntegrityError: not JSON, or JSON in another form than the canonical one.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_int=_integer_or_float)
        canonical = canonical_json(value)
    except (ValueError, SpecError, RecursionError) as error:
        raise IntegrityError(f"{name}: not canonical JSON: {error}") from error
    if canonical != content:
        raise IntegrityError(f"{name}: JSON is not in canonical form (RFC 8785)")
    return value

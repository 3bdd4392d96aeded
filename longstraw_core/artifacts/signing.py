"""Ed25519 signatures of receipts as DSSE envelopes, the form in-toto tools read; knows no store.

Off unless `LONGSTRAW_SIGNING_KEY` (a PEM file with a private key) or `LONGSTRAW_VERIFY_KEY` (one with the public key)
is set. Keys come from files that the environment names, never from a specification.
"""

import base64
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import Field, ValidationError

from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.model import StrictModel

SIGNING_KEY_VARIABLE = "LONGSTRAW_SIGNING_KEY"
VERIFY_KEY_VARIABLE = "LONGSTRAW_VERIFY_KEY"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MEDIA_TYPE_ENVELOPE = "application/vnd.dsse.envelope.v1+json"


class Signature(StrictModel):
    """One signature of an envelope."""

    keyid: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    """SHA-256 of the public key in DER form."""
    sig: str


class Envelope(StrictModel):
    """A DSSE envelope: a receipt's bytes and exactly one signature over them."""

    payload: str
    payload_type: Annotated[Literal["application/vnd.in-toto+json"], Field(alias="payloadType")] = PAYLOAD_TYPE
    signatures: Annotated[tuple[Signature, ...], Field(min_length=1, max_length=1)]

    model_config = StrictModel.model_config | {"serialize_by_alias": True, "validate_by_name": True}


@dataclass(frozen=True, slots=True)
class ReceiptKeys:
    """The keys of this process: whether receipts are signed when written and refused when not signed."""

    signing: Ed25519PrivateKey | None = None
    verify: Ed25519PublicKey | None = None

    def check_can_write(self) -> None:
        """Raise SpecError where receipts are refused unless signed and this process could not sign its own."""
        if self.verify is not None and self.signing is None:
            raise SpecError(
                f"{VERIFY_KEY_VARIABLE} is set and {SIGNING_KEY_VARIABLE} is not, so this receipt would be refused "
                f"when it is read; set {SIGNING_KEY_VARIABLE}, or neither"
            )

    def sign(self, content: bytes) -> bytes:
        """Envelope of a receipt's bytes; Ed25519 is deterministic, so the same receipt gives the same envelope."""
        if self.signing is None:
            raise AssertionError("sign() without a signing key")
        signature = self.signing.sign(_authenticated(content))
        envelope = Envelope(
            payload=base64.b64encode(content).decode("ascii"),
            signatures=(
                Signature(keyid=key_id(self.signing.public_key()), sig=base64.b64encode(signature).decode("ascii")),
            ),
        )
        return canonical_json(envelope)

    def check(self, envelope: bytes, *, name: str) -> bytes:
        """Return the receipt bytes that an envelope carries, if our verify key signed exactly them.

        Raises:
            IntegrityError: another key signed, the signature is wrong, or it is no envelope.
        """
        if self.verify is None:
            raise AssertionError("check() without a verify key")
        content, signature = read_envelope(envelope, name=name)
        if signature.keyid != key_id(self.verify):
            raise IntegrityError(
                f"{name}: signed by {signature.keyid}, expected {key_id(self.verify)}; do not use this receipt"
            )
        try:
            self.verify.verify(_decoded(signature.sig, name), _authenticated(content))
        except InvalidSignature as error:
            raise IntegrityError(f"{name}: the signature is not of these bytes; do not use this receipt") from error
        return content


NO_KEYS = ReceiptKeys()


def read_envelope(envelope: bytes, *, name: str) -> tuple[bytes, Signature]:
    """Payload and signature of an envelope, the signature not checked."""
    value = parse_canonical_json(envelope, name=name)
    try:
        parsed = Envelope.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a DSSE envelope with one signature") from error
    return _decoded(parsed.payload, name), parsed.signatures[0]


def keys_from_environment() -> ReceiptKeys:
    """The keys that `LONGSTRAW_SIGNING_KEY` and `LONGSTRAW_VERIFY_KEY` name; none when neither is set.

    With only a signing key, receipts are checked against its public part: a signed run refuses unsigned ones.
    """
    signing_path, verify_path = os.environ.get(SIGNING_KEY_VARIABLE, ""), os.environ.get(VERIFY_KEY_VARIABLE, "")
    if not signing_path and not verify_path:
        return NO_KEYS
    signing = read_signing_key(Path(signing_path)) if signing_path else None
    if verify_path:
        verify = read_verify_key(Path(verify_path))
        if signing is not None and key_id(signing.public_key()) != key_id(verify):
            raise SpecError(
                f"{VERIFY_KEY_VARIABLE} is not the public key of {SIGNING_KEY_VARIABLE}; this run would refuse its own "
                "receipts"
            )
        return ReceiptKeys(signing, verify)
    return ReceiptKeys(signing, signing.public_key() if signing else None)


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key file (PEM, PKCS#8, not encrypted); messages never hold what is in it."""
    try:
        key = load_pem_private_key(_read(path, SIGNING_KEY_VARIABLE), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SpecError(_not_a_key(SIGNING_KEY_VARIABLE, path, "private")) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SpecError(_not_a_key(SIGNING_KEY_VARIABLE, path, "private"))
    return key


def read_verify_key(path: Path) -> Ed25519PublicKey:
    """Read a public key file (PEM)."""
    try:
        key = load_pem_public_key(_read(path, VERIFY_KEY_VARIABLE))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SpecError(_not_a_key(VERIFY_KEY_VARIABLE, path, "public")) from error
    if not isinstance(key, Ed25519PublicKey):
        raise SpecError(_not_a_key(VERIFY_KEY_VARIABLE, path, "public"))
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """`sha256:<hex>` of the public key's DER form."""
    return "sha256:" + hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _authenticated(content: bytes) -> bytes:
    """What is signed: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(content), content)


def _decoded(text: str, name: str) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise IntegrityError(f"{name}: not valid base64; do not use this receipt") from error
    # the last character has bits that decoding drops: of several spellings only the one that is written counts
    if base64.b64encode(decoded).decode("ascii") != text:
        raise IntegrityError(f"{name}: base64 in another form than the canonical one; do not use this receipt")
    return decoded


def _read(path: Path, variable: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"{variable}={path}: {error.strerror}; name a readable PEM file") from error


def _not_a_key(variable: str, path: Path, part: str) -> str:
    return f"{variable}={path}: not an unencrypted Ed25519 {part} key in PEM form (openssl genpkey -algorithm ed25519)"

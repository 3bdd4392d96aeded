"""Given a signing key, when receipts are written and read, then only those that it signed are accepted."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from longstraw_core.artifacts import find_receipt, keys_from_environment, open_store, read_receipt, verify_store
from longstraw_core.artifacts.receipts import envelope_name, receipt_name, write_receipt
from longstraw_core.artifacts.store import Store
from longstraw_core.spec import canonical_json
from longstraw_core.spec.errors import IntegrityError, SpecError
from tests.artifacts.conftest import publish_run_into

BYTES = "application/octet-stream"
NAME = receipt_name("demo", 1, "audit_data")


def write_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """A new key pair as two PEM files."""
    key = Ed25519PrivateKey.generate()
    private, public = directory / f"{name}.pem", directory / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def use_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Store]:
    """Open the store with a signing key and a verify key, given by the names of key pairs."""
    pairs = {name: write_keys(tmp_path, name) for name in ("ours", "theirs")}

    def use(signing: str | None = None, verify: str | None = None) -> Store:
        for variable, path in (
            ("LONGSTRAW_SIGNING_KEY", pairs[signing][0] if signing else None),
            ("LONGSTRAW_VERIFY_KEY", pairs[verify][1] if verify else None),
        ):
            if path is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, str(path))
        return open_store((tmp_path / "store").as_uri(), create=True)

    return use


def replace(store: Store, name: str, content: bytes) -> None:
    store.delete_object(name)
    store.create_object(name, content, BYTES)


def test_a_signed_run_verifies_with_its_public_key_and_needs_no_key_to_be_read(
    use_keys: Callable[..., Store], snapshot: Path, data_file: Path, tmp_path: Path
) -> None:
    publish_run_into(use_keys(signing="ours"), tmp_path, snapshot, data_file)
    for store in (use_keys(verify="ours"), use_keys(signing="ours"), use_keys("ours", "ours")):
        report = verify_store(store)
        assert report.faults == []
        assert report.receipts == 6
        assert report.unchecked == []
    unkeyed = verify_store(use_keys())
    assert unkeyed.faults == []
    assert len([line for line in unkeyed.unchecked if "no verify key" in line]) == 6


def test_the_envelope_is_dsse_over_the_receipt(use_keys: Callable[..., Store], make_predicate) -> None:
    store = use_keys(signing="ours")
    outputs = {"x": store.put_blob(b"x", BYTES)}
    receipt = write_receipt(store, make_predicate("audit_data", 1, {}, outputs))
    envelope = json.loads(store.get_bytes(store.describe_object(envelope_name(NAME), BYTES)))
    payload = base64.b64decode(envelope["payload"])
    assert payload == store.get_bytes(receipt)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    key = keys_from_environment().verify
    assert key is not None
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)


def test_unsigned_and_re_signed_receipts_are_refused(
    use_keys: Callable[..., Store], snapshot: Path, data_file: Path, tmp_path: Path, make_predicate
) -> None:
    publish_run_into(use_keys(), tmp_path, snapshot, data_file)
    store = use_keys(verify="ours")
    found = find_receipt(store, "demo", 1, "audit_data")
    assert found is not None
    with pytest.raises(IntegrityError, match="is not signed"):
        read_receipt(store, found)
    assert {fault.kind for fault in verify_store(store).faults} == {"signature"}
    assert len(verify_store(store).faults) == 6
    content = store.get_bytes(found)
    store.create_object(envelope_name(NAME), use_keys(signing="theirs").keys.sign(content), BYTES)
    with pytest.raises(IntegrityError, match="signed by sha256:"):
        read_receipt(use_keys(verify="ours"), found)
    assert len(verify_store(use_keys(verify="ours")).faults) == 6
    replace(store, envelope_name(NAME), use_keys(signing="ours").keys.sign(content))
    read_receipt(use_keys(verify="ours"), found)
    forged = content.replace(b'"seed":7', b'"seed":8')
    replace(store, NAME, forged)
    found = find_receipt(store, "demo", 1, "audit_data")
    assert found is not None
    with pytest.raises(IntegrityError, match="signs another receipt"):
        read_receipt(use_keys(verify="ours"), found)
    signed = [fault for fault in verify_store(use_keys()).faults if fault.kind == "signature"]
    assert [fault.path for fault in signed] == [NAME]  # noticed without any key


def test_a_signature_moved_to_other_bytes_is_refused(use_keys: Callable[..., Store], make_predicate) -> None:
    store = use_keys(signing="ours")
    receipt = write_receipt(store, make_predicate("audit_data", 1, {}, {"x": store.put_blob(b"x", BYTES)}))
    envelope = json.loads(store.get_bytes(store.describe_object(envelope_name(NAME), BYTES)))
    forged = store.get_bytes(receipt).replace(b'"seed":7', b'"seed":8')
    envelope["payload"] = base64.b64encode(forged).decode()
    replace(store, NAME, forged)
    replace(store, envelope_name(NAME), json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(IntegrityError, match="not of these bytes"):
        read_receipt(store, store.describe_object(NAME, BYTES))
    for broken in (b"{}", b"no json", b'{"payload":"*","payloadType":"application/vnd.in-toto+json","signatures":[]}'):
        replace(store, envelope_name(NAME), broken)
        with pytest.raises(IntegrityError):
            read_receipt(store, store.describe_object(NAME, BYTES))


def test_a_writer_killed_between_signature_and_receipt_is_completed_with_what_it_signed(
    use_keys: Callable[..., Store], make_predicate, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = use_keys(signing="ours")
    first = make_predicate("audit_data", 1, {}, {"x": store.put_blob(b"x", BYTES)}, seconds=1.0)
    receipt = write_receipt(store, first)
    content = store.get_bytes(receipt)
    store.delete_object(NAME)
    assert verify_store(store).faults == []
    assert find_receipt(store, "demo", 1, "audit_data") is None
    again = write_receipt(store, make_predicate("audit_data", 1, {}, first.outputs, seconds=2.0))
    assert store.get_bytes(again) == content
    store.delete_object(NAME)
    replace(store, envelope_name(NAME), use_keys(signing="theirs").keys.sign(content))
    with pytest.raises(IntegrityError, match="signed by"):
        write_receipt(use_keys(signing="ours"), first)


def test_key_files_that_cannot_be_used_are_named_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_keys: Callable[..., Store]
) -> None:
    rsa = tmp_path / "rsa.pem"
    rsa.write_bytes(generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
    for path in (rsa, garbage, tmp_path / "absent.pem", tmp_path / "ours.pub.pem"):
        monkeypatch.setenv("LONGSTRAW_SIGNING_KEY", str(path))
        with pytest.raises(SpecError, match=f"LONGSTRAW_SIGNING_KEY={path}") as refused:
            keys_from_environment()
        assert "c2VjcmV0" not in str(refused.value)
    with pytest.raises(SpecError, match="not the public key of"):
        use_keys("ours", "theirs")


@pytest.mark.parametrize("part", ["sig", "payload"])
def test_another_spelling_of_the_same_base64_is_refused(
    use_keys: Callable[..., Store], make_predicate, part: str
) -> None:
    """Decoding drops the last bits, so a changed character may give the same bytes."""
    store = use_keys(signing="ours")
    for status in ("ok", "fine", "good!"):  # one of three lengths in a row has a payload without padding
        predicate = make_predicate("audit_data", 1, {}, {"x": store.put_blob(b"x", BYTES)})
        receipt = write_receipt(store, predicate.model_copy(update={"status": status}))
        envelope = json.loads(store.get_bytes(store.describe_object(envelope_name(NAME), BYTES)))
        holder = envelope if part == "payload" else envelope["signatures"][0]
        if holder[part].endswith("="):
            break
        store.delete_object(NAME)
        store.delete_object(envelope_name(NAME))
    digits, padding = holder[part].rstrip("="), "=" * holder[part].count("=")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    holder[part] = digits[:-1] + alphabet[alphabet.index(digits[-1]) ^ 1] + padding
    assert padding
    replace(store, envelope_name(NAME), canonical_json(envelope))
    with pytest.raises(IntegrityError, match="base64"):
        read_receipt(store, receipt)
    assert [fault.kind for fault in verify_store(store).faults] == ["signature"]


def test_who_can_only_check_writes_no_receipt_that_it_would_refuse(
    use_keys: Callable[..., Store], make_predicate
) -> None:
    store = use_keys(verify="ours")
    blob = store.put_blob(b"x", BYTES)
    with pytest.raises(SpecError, match="LONGSTRAW_SIGNING_KEY is not"):
        write_receipt(store, make_predicate("audit_data", 1, {}, {"x": blob}))
    assert store.list_names("runs/") == []

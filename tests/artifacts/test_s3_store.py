"""Given an S3 server, when artifacts are stored and read, then the rules of every store hold; on moto and SeaweedFS."""

import hashlib
import os
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from longstraw_core.artifacts import (
    AlreadyPublished,
    FileStore,
    collect_garbage,
    find_receipt,
    materialize_tree,
    open_store,
    publish_tree,
    read_receipt,
    verify_store,
)
from longstraw_core.artifacts.store import Store, blob_name
from longstraw_core.spec.errors import IntegrityError, LongStrawError, Retryable, SpecError
from tests.artifacts.conftest import publish_run_into
from tests.servers.fault_proxy import fault_proxy
from tests.servers.moto_server import moto_server
from tests.servers.ports import free_port
from tests.servers.seaweedfs import S3Server

BYTES = "application/octet-stream"
MIB = 1 << 20


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    """moto with one bucket."""
    with moto_server() as server:
        server.client().create_bucket(Bucket="artifacts")
        yield server


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that the environment names, and parts as small as servers allow."""
    found: S3Server = request.getfixturevalue("moto" if request.param == "moto" else "seaweedfs_server")
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("longstraw_core.artifacts.s3_writer.SMALL_PART_BYTES", 5 * MIB)
    monkeypatch.setattr("longstraw_core.artifacts.s3_reader.READ_PART_BYTES", MIB)
    return found


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A prefix that no other test uses."""
    return hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]


@pytest.fixture
def store(server: S3Server, prefix: str) -> Store:
    """An empty store."""
    return open_store(f"s3://artifacts/{prefix}", create=True)


@pytest.mark.parametrize("size", [0, 200_000, 6 * MIB + 3])
def test_bytes_and_files_come_back_under_the_digest_that_every_store_gives_them(
    store: Store, server: S3Server, prefix: str, tmp_path: Path, size: int
) -> None:
    content = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(content)
    descriptor = store.put_blob(source, BYTES)
    assert descriptor == FileStore(tmp_path / "local", create=True).put_blob(content, BYTES)
    assert store.put_blob(content, BYTES) == descriptor
    assert store.get_bytes(descriptor) == content
    store.get_file(descriptor, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert store.list_names() == [descriptor.uri]
    head = server.client().head_object(Bucket="artifacts", Key=f"{prefix}/{descriptor.uri}")
    assert ("-" in head["ETag"]) == (size > 5 * MIB)  # the multipart ETag is no digest, and nothing takes it for one


def test_a_named_object_is_created_once(store: Store) -> None:
    first = store.create_object("runs/r/x", b"one", BYTES)
    assert store.create_object("runs/r/x", b"one", BYTES) == first
    with pytest.raises(AlreadyPublished) as refused:
        store.create_object("runs/r/x", b"two", BYTES)
    assert refused.value.published == first
    assert store.get_bytes(first) == b"one"
    for name in ("blobs/x", "staging/x", "policies/x", "/x", "a/../b", "", "a//b"):
        with pytest.raises(SpecError):
            store.create_object(name, b"", BYTES)


def test_exactly_one_of_many_writers_creates_a_name(store: Store) -> None:
    def create(number: int) -> bool:
        try:
            store.create_object("runs/r/race", b"%d" % number, BYTES)
        except AlreadyPublished:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(create, range(32))) == 1


@pytest.mark.parametrize("harm", ["flipped", "longer", "shorter", "missing"])
def test_a_stored_blob_that_is_not_its_digest_is_never_accepted(
    store: Store, server: S3Server, prefix: str, tmp_path: Path, harm: str
) -> None:
    content = os.urandom(3 * MIB)
    descriptor = store.put_blob(content, BYTES)
    changed = {"flipped": b"\1" + content[1:], "longer": content + b"x", "shorter": content[:-1], "missing": b""}[harm]
    client, key = server.client(), f"{prefix}/{descriptor.uri}"
    if harm == "missing":
        client.delete_object(Bucket="artifacts", Key=key)
    else:
        client.put_object(Bucket="artifacts", Key=key, Body=changed)
    with pytest.raises(IntegrityError):
        store.get_bytes(descriptor)
    with pytest.raises(IntegrityError):
        store.get_file(descriptor, tmp_path / "copy")
    assert os.listdir(tmp_path) == []
    if harm != "missing":
        with pytest.raises(IntegrityError, match="is corrupt: expected"):
            store.put_blob(content, BYTES)
        assert [fault.kind for fault in verify_store(store).faults] == ["changed"]


@pytest.mark.parametrize("server", ["seaweedfs"], indirect=True)
def test_1001_objects_under_one_prefix_are_all_found(store: Store, server: S3Server, prefix: str) -> None:
    client = server.client()
    names = [f"runs/many/{number:04d}" for number in range(1001)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: client.put_object(Bucket="artifacts", Key=f"{prefix}/{name}", Body=b"x"), names))
    client.put_object(Bucket="artifacts", Key=f"{prefix}/runs/elsewhere", Body=b"x")
    client.put_object(Bucket="artifacts", Key=f"{prefix}-of-another-store/runs/many/x", Body=b"x")
    assert store.list_names("runs/many/") == names


def test_an_object_replaced_between_its_parts_is_refused_and_its_destination_stays_absent(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(8 * MIB)
    descriptor = open_store(f"s3://artifacts/{prefix}", create=True).put_blob(content, BYTES)
    gets: list[bytes] = []
    with fault_proxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        store = open_store(f"s3://artifacts/{prefix}")

        def replace(line: bytes) -> None:
            if line.startswith(b"GET") and b"blobs" in line:
                gets.append(line)
                if len(gets) == 2:
                    key = f"{prefix}/{descriptor.uri}"
                    server.client().put_object(Bucket="artifacts", Key=key, Body=content[:-1] + b"x")

        proxy.on_request = replace
        with pytest.raises(IntegrityError, match="was replaced"):
            store.get_file(descriptor, tmp_path / "copy")
    assert len(gets) >= 2
    assert os.listdir(tmp_path) == []


def test_a_run_verifies_and_every_change_is_named(
    store: Store, server: S3Server, prefix: str, snapshot: Path, data_file: Path, tmp_path: Path
) -> None:
    publish_run_into(store, tmp_path, snapshot, data_file)
    report = verify_store(store)
    assert report.faults == []
    assert report.receipts == 6
    found = find_receipt(store, "demo", 1, "train")
    assert found is not None
    tree = read_receipt(store, found).predicate.outputs["adapter"]
    manifest = materialize_tree(store, tree, tmp_path / "tree")
    assert publish_tree(store, tmp_path / "tree") == tree
    client = server.client()
    changed, removed = blob_name(manifest.entries[0].digest), blob_name(manifest.entries[1].digest)
    client.put_object(Bucket="artifacts", Key=f"{prefix}/{changed}", Body=b"other")
    client.delete_object(Bucket="artifacts", Key=f"{prefix}/{removed}")
    client.put_object(Bucket="artifacts", Key=f"{prefix}/runs/demo/extra", Body=b"extra")
    kinds = {(fault.path, fault.kind) for fault in verify_store(store, "demo").faults}
    assert {(changed, "changed"), (removed, "missing"), ("runs/demo/extra", "extra")} <= kinds
    with pytest.raises(IntegrityError):
        materialize_tree(store, tree, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_garbage_that_a_new_run_starts_from_while_it_is_collected_stays(
    store: Store, snapshot: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = publish_run_into(store, tmp_path, snapshot, data_file, run="old", transactions=1)
    time.sleep(1.1)  # servers tell times in whole seconds
    publish_run_into(store, tmp_path, snapshot, data_file, run="new", transactions=1)
    delete, begun = store.delete_object, []

    def begin_before_the_first_deletion(name: str) -> None:
        if not begun:
            begun.append(name)
            publish_run_into(store, tmp_path, snapshot, data_file, run="late", transactions=1, parent=old, lineage=1)
        delete(name)

    monkeypatch.setattr(store, "delete_object", begin_before_the_first_deletion)
    done = collect_garbage(store, keep_runs=1, grace_seconds=0.0)
    assert done.dropped_runs == ["old"]
    assert store.get_bytes(old)
    assert verify_store(store, "late").faults == []


def test_garbage_goes_and_what_is_kept_verifies(store: Store, snapshot: Path, data_file: Path, tmp_path: Path) -> None:
    publish_run_into(store, tmp_path, snapshot, data_file, run="old", transactions=1)
    time.sleep(1.1)  # servers tell times in whole seconds
    publish_run_into(store, tmp_path, snapshot, data_file, run="new", transactions=1)
    before = set(store.list_names())
    done = collect_garbage(store, keep_runs=1, grace_seconds=0)
    assert (done.kept_runs, done.dropped_runs) == (["new"], ["old"])
    assert done.blobs
    assert set(store.list_names()) == before - set(done.blobs) - set(done.receipts)
    assert verify_store(store).faults == []


@pytest.mark.parametrize("server", ["seaweedfs"], indirect=True)  # moto keeps its objects in this process
def test_memory_is_bounded_by_the_parts_in_flight(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(MIB))
    tracemalloc.start()
    try:
        descriptor = store.put_blob(source, BYTES)
        uploaded = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        store.get_file(descriptor, tmp_path / "copy")
        downloaded = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert uploaded < 8 * 5 * MIB + 10 * MIB
    assert downloaded < 2 * 8 * MIB + 10 * MIB
    assert hashlib.sha256((tmp_path / "copy").read_bytes()).hexdigest() == descriptor.hex


def test_no_request_needs_checksum_trailers(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        store = open_store(f"s3://artifacts/{prefix}", create=True)
        for size in (10, 6 * MIB):
            descriptor = store.put_blob(os.urandom(size), BYTES)
            store.get_file(descriptor, tmp_path / str(size))
        writes = [head.lower() for head in proxy.heads if head.startswith(b"PUT") and b"content-length: 0" not in head]
    assert writes
    for head in writes:
        assert b"x-amz-trailer" not in head
        assert b"aws-chunked" not in head
        assert b"x-amz-checksum-sha256" in head or b"content-length: 0\r" in head


def test_what_is_wrong_with_the_server_or_the_credentials_is_said_without_secrets(
    seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(uri: str = "s3://artifacts/errors", **environment: str) -> LongStrawError:
        with monkeypatch.context() as patch:
            for name, value in (seaweedfs_server.environment() | environment).items():
                if value:
                    patch.setenv(name, value)
                else:
                    patch.delenv(name, raising=False)
            with pytest.raises(LongStrawError) as caught:
                open_store(uri, create=True)
        assert seaweedfs_server.secret_key not in str(caught.value)
        assert "wrong-secret" not in str(caught.value)
        return caught.value

    assert "does not accept these credentials" in str(refusal(AWS_SECRET_ACCESS_KEY="wrong-secret"))  # noqa: S106
    assert "does not accept these credentials" in str(refusal(AWS_ACCESS_KEY_ID="nobody"))
    assert "set AWS_ACCESS_KEY_ID" in str(refusal(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY=""))
    missing = refusal("s3://no-such-bucket/x")
    assert isinstance(missing, SpecError)
    assert "no such bucket" in str(missing)
    nobody = f"http://127.0.0.1:{free_port()}"
    unreachable = refusal(AWS_ENDPOINT_URL_S3=nobody, AWS_MAX_ATTEMPTS="2")
    assert isinstance(unreachable, Retryable)
    assert "check AWS_ENDPOINT_URL_S3" in str(unreachable)
    assert nobody in str(unreachable)
    assert "check AWS_ENDPOINT_URL_S3" in str(refusal(AWS_ENDPOINT_URL_S3="not a url"))
    assert "LONGSTRAW_S3_PATH_STYLE" in str(refusal(LONGSTRAW_S3_PATH_STYLE="maybe"))
    assert "AWS_PROFILE names profile 'nobody-has-this'" in str(refusal(AWS_PROFILE="nobody-has-this"))
    for name, value in (
        ("AWS_MAX_ATTEMPTS", "many"),
        ("AWS_MAX_ATTEMPTS", "0"),
        ("AWS_MAX_ATTEMPTS", "-3"),
        ("AWS_MAX_ATTEMPTS", "2.5"),
        ("AWS_RETRY_MODE", "eager"),
        ("AWS_REGION", "not a region"),
        ("AWS_DEFAULT_REGION", "https://eu"),
    ):
        refused = refusal(**{name: value})
        assert isinstance(refused, SpecError)
        assert str(refused).startswith(f"{name}='{value}' ")
        assert "\n" not in str(refused)
    for uri in ("s3://", "s3://UPPER/x", "s3://user:pw@bucket/x", "s3://artifacts/../x", "s3://artifacts/a//b"):
        assert isinstance(refusal(uri), SpecError)
    for uri in (
        "s3://AKIAKEY:wrong-secret@artifacts/x",
        "s3://AKIAKEY:wrong-secret/with/slashes@artifacts",
        "s3://artifacts/x@wrong-secret",
        "s3://artifacts/x?X-Amz-Signature=wrong-secret",
        "http://AKIAKEY:wrong-secret@artifacts/x",
        "AKIAKEY:wrong-secret",
    ):
        assert "AKIAKEY" not in str(refusal(uri))
        assert "write s3://bucket/prefix" in str(refusal(uri)) or "unknown scheme" in str(refusal(uri))
    with monkeypatch.context() as patch:
        for name, value in seaweedfs_server.environment().items():
            patch.setenv(name, value)
        with pytest.raises(SpecError, match="is empty; check the URI"):
            open_store("s3://artifacts/nothing-here")


def test_another_region_and_another_kind_of_server_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    from longstraw_core.artifacts.s3_connection import connect

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://user:password@s3.example.org:9000/x")
    connection = connect("bucket")
    assert connection.shown == "s3://bucket at https://s3.example.org:9000"

    def refused(status: int, code: str, **headers: str) -> str:
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
        error = ClientError({"Error": {"Code": code}, "ResponseMetadata": metadata}, "GetObject")  # type: ignore[arg-type]
        return str(connection.typed(error, "reading x"))

    assert "set AWS_REGION=eu-west-1" in refused(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"})
    assert "another region" in refused(400, "AuthorizationHeaderMalformed")
    assert "no space left" in refused(507, "InsufficientStorage")
    assert "conditional writes" in refused(501, "NotImplemented")
    assert "is an S3 server" in str(connection.typed(ResponseParserError("html"), "reading x"))


def test_https_needs_an_authority_that_the_environment_names(
    seaweedfs_server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    authority, private = tmp_path / "ca.pem", tmp_path / "key.pem"
    authority.write_bytes(certificate.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, private)
    with fault_proxy(seaweedfs_server.endpoint, context) as proxy:
        for variable, value in seaweedfs_server.environment(proxy.endpoint).items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(SpecError, match="not trusted; set AWS_CA_BUNDLE"):
            open_store(f"s3://artifacts/{prefix}", create=True)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
        store = open_store(f"s3://artifacts/{prefix}", create=True)
        content = os.urandom(17 * MIB)
        assert store.get_bytes(store.put_blob(content, BYTES)) == content


@pytest.mark.parametrize("server", ["moto"], indirect=True)  # SeaweedFS would notice the missing signed header
@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_either_condition_is_refused_before_anything_depends_on_it(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    uri, pointer = f"s3://artifacts/{prefix}", "policies/main/current.json"
    good = open_store(uri, create=True)
    assert good.replace_pointer(pointer, b"first", None)
    with fault_proxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        proxy.stripped = (header.lower().encode(),)
        with pytest.raises(SpecError, match=f"ignores '{header}"):
            open_store(uri, create=True)
        opened = open_store(uri)
        stored = opened.read_pointer(pointer)
        for content in (b"second", b"rival"):  # two runs that both start from the first
            with pytest.raises(SpecError, match=f"ignores '{header}"):
                opened.replace_pointer(pointer, content, stored)
    assert good.read_pointer(pointer) == stored
    assert good.list_names() == [pointer]  # the probe left nothing


def test_a_server_whose_conditions_hold_passes_the_probe_and_lets_one_of_two_win(store: Store) -> None:
    pointer = "policies/main/current.json"
    assert store.list_names() == []
    assert store.replace_pointer(pointer, b"first", None)
    first = store.read_pointer(pointer)
    assert store.replace_pointer(pointer, b"second", first)
    assert not store.replace_pointer(pointer, b"rival", first)
    assert not store.replace_pointer(pointer, b"late", None)
    second = store.read_pointer(pointer)
    assert second is not None
    assert second.content == b"second"


def test_a_server_that_ignores_conditions_is_refused(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longstraw_core.artifacts.s3_conditions.put_once", lambda *_: True)
    with pytest.raises(SpecError, match="ignores 'If-None-Match"):
        open_store(f"s3://artifacts/{prefix}", create=True)

"""Given a real S3 server behind a bad network, kills and full disks: nothing corrupt is accepted, a rerun completes."""

import hashlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from longstraw_core.artifacts import find_receipt, open_store, verify_store, write_receipt
from longstraw_core.artifacts.files import PARTIAL_PREFIX, clear_partials
from longstraw_core.artifacts.s3_connection import S3Client, connect
from longstraw_core.artifacts.s3_store import S3Store
from longstraw_core.artifacts.store import Store
from longstraw_core.spec import Descriptor
from longstraw_core.spec.errors import IntegrityError, Retryable, SpecError
from tests.artifacts.conftest import publish_run_into
from tests.artifacts.test_kills import start, wait
from tests.servers.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.servers.seaweedfs import S3Server

BYTES = "application/octet-stream"
MIB = 1 << 20
CONTENT = os.urandom(17 * MIB)
"""Four parts of five MiB, the last one shorter."""

is_part: Callable[[bytes], bool] = lambda line: line.startswith(b"PUT") and b"partNumber=" in line  # noqa: E731
is_read: Callable[[bytes], bool] = lambda line: line.startswith(b"GET") and b"/blobs/" in line  # noqa: E731
is_blob_write: Callable[[bytes], bool] = lambda line: line.startswith(b"PUT") and b"/blobs/" in line  # noqa: E731


@pytest.fixture
def proxy(seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that the environment names as the server; no fault is armed yet."""
    monkeypatch.setattr("longstraw_core.artifacts.s3_writer.SMALL_PART_BYTES", 5 * MIB)
    monkeypatch.setattr("longstraw_core.artifacts.s3_reader.READ_PART_BYTES", 2 * MIB)
    with fault_proxy(seaweedfs_server.endpoint) as running:
        for name, value in seaweedfs_server.environment(running.endpoint).items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def uri(tmp_path: Path, proxy: FaultProxy) -> str:
    """A store with one object, so that it can be opened by readers."""
    uri = f"s3://artifacts/faults-{os.getpid()}-{tmp_path.name}"
    open_store(uri, create=True).create_object("runs/here", b"", BYTES)
    return uri


@pytest.fixture
def store(uri: str) -> Store:
    """An open store behind the proxy."""
    return open_store(uri)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of several parts, of other bytes for every test."""
    path = tmp_path / "source"
    path.write_bytes(os.urandom(16) + CONTENT[16:])
    return path


def parts_sent(proxy: FaultProxy) -> int:
    return sum(map(is_part, proxy.requests))


@pytest.mark.parametrize("kind", ["slow_down", "cut_request", "cut_answer", "truncate_answer", "flip_request"])
def test_passing_faults_of_the_network_are_survived_in_both_directions(
    store: Store, proxy: FaultProxy, source: Path, tmp_path: Path, kind: str
) -> None:
    if not kind.endswith("answer"):
        proxy.faults = [Fault(kind, 2, is_blob_write, after_bytes=100_000)]
    descriptor = store.put_blob(source, BYTES)
    assert all(fault.hits == fault.times for fault in proxy.faults)
    if not kind.endswith("request"):
        proxy.faults = [Fault(kind, 3, is_read, after_bytes=100_000)]
    store.get_file(descriptor, tmp_path / "copy")
    assert all(fault.hits == fault.times for fault in proxy.faults)
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_byte_flipped_on_the_way_down_is_refused_and_a_rerun_completes(
    store: Store, proxy: FaultProxy, source: Path, tmp_path: Path
) -> None:
    descriptor = store.put_blob(source, BYTES)
    proxy.faults = [Fault("flip_answer", 1, is_read, after_bytes=1_000_000)]
    with pytest.raises(IntegrityError, match="do not use it"):
        store.get_file(descriptor, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["source"]
    store.get_file(descriptor, tmp_path / "copy")


def test_a_network_that_damages_every_upload_stores_nothing(store: Store, proxy: FaultProxy, source: Path) -> None:
    proxy.faults = [Fault("flip_request", 10_000, is_blob_write, after_bytes=100)]
    with pytest.raises(IntegrityError, match="received other bytes than were sent"):
        store.put_blob(source, BYTES)
    with pytest.raises(IntegrityError, match="received other bytes than were sent"):
        store.put_blob(b"x" * 1000, BYTES)
    proxy.faults = []
    assert store.list_names("blobs/") == []
    assert store.get_bytes(store.put_blob(source, BYTES)) == source.read_bytes()


def test_a_network_that_always_breaks_off_is_retryable_and_leaves_nothing(
    store: Store, proxy: FaultProxy, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = store.put_blob(source, BYTES)
    monkeypatch.setattr("longstraw_core.artifacts.s3_reader.TOTAL_ATTEMPTS", 2)
    proxy.faults = [Fault("cut_answer", 10_000, is_read)]
    with pytest.raises(Retryable, match="breaks off every time"):
        store.get_file(descriptor, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["source"]


def kill_on(proxy: FaultProxy, child: list[int], matches: Callable[[bytes], bool], number: int) -> None:
    """Kill the child process when its `number`th matching request arrives; the request goes nowhere."""
    seen: list[bytes] = []

    def request(line: bytes) -> None:
        if matches(line):
            seen.append(line)
            if len(seen) == number:
                time.sleep(0.3)  # what went before is answered
                os.kill(child[0], signal.SIGKILL)
                time.sleep(0.1)
                raise EOFError

    proxy.on_request = request


def killed(proxy: FaultProxy, matches: Callable[[bytes], bool], number: int, work: Callable[[], object]) -> bool:
    """Run work in a child that is killed at its `number`th matching request."""
    child = [0]
    kill_on(proxy, child, matches, number)
    child[0] = start(work)
    status = wait(child[0])
    proxy.on_request = None
    return status == -signal.SIGKILL


def test_an_upload_that_was_killed_goes_on_where_it_stopped(uri: str, proxy: FaultProxy, source: Path) -> None:
    assert killed(proxy, is_part, 3, lambda: open_store(uri).put_blob(source, BYTES))
    store = open_store(uri)
    assert store.list_names("blobs/") == []
    before = parts_sent(proxy)
    descriptor = store.put_blob(source, BYTES)
    assert parts_sent(proxy) - before < 4
    assert store.get_bytes(descriptor) == source.read_bytes()
    assert verify_store(store).ok is False  # runs/here is no receipt
    assert [fault.path for fault in verify_store(store).faults] == ["runs/here"]


def test_parts_of_other_bytes_are_never_taken_over(uri: str, proxy: FaultProxy, seaweedfs_server: S3Server) -> None:
    store = open_store(uri)
    content = os.urandom(6 * MIB)
    key = f"{uri.removeprefix('s3://artifacts/')}/blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    client = seaweedfs_server.client()
    upload = client.create_multipart_upload(Bucket="artifacts", Key=key)["UploadId"]
    client.upload_part(Bucket="artifacts", Key=key, UploadId=upload, PartNumber=1, Body=bytes(5 * MIB))
    descriptor = store.put_blob(content, BYTES)
    assert parts_sent(proxy) == 2
    assert store.get_bytes(descriptor) == content


def test_a_download_that_was_killed_leaves_no_destination_and_a_rerun_completes(
    uri: str, proxy: FaultProxy, source: Path, tmp_path: Path
) -> None:
    descriptor = open_store(uri).put_blob(source, BYTES)
    target = tmp_path / "target"
    target.mkdir()
    assert killed(proxy, is_read, 4, lambda: open_store(uri).get_file(descriptor, target / "copy"))
    assert all(name.startswith(PARTIAL_PREFIX) for name in os.listdir(target))
    clear_partials(target)
    assert os.listdir(target) == []
    open_store(uri).get_file(descriptor, target / "copy")
    assert (target / "copy").read_bytes() == source.read_bytes()


def test_a_stage_killed_between_its_last_blob_and_its_receipt_is_not_done_and_a_rerun_completes_it(
    uri: str, proxy: FaultProxy, make_predicate
) -> None:
    def stage() -> None:
        store = open_store(uri)
        outputs = {"prompts": store.put_blob(b"prompts of a killed stage", BYTES)}
        write_receipt(store, make_predicate("audit_data", 1, {}, outputs))

    is_receipt: Callable[[bytes], bool] = lambda line: line.startswith(b"PUT") and b"receipt.json" in line  # noqa: E731
    assert killed(proxy, is_receipt, 1, stage)
    store = open_store(uri)
    assert len(store.list_names("blobs/")) == 1
    assert find_receipt(store, "demo", 1, "audit_data") is None
    stage()
    assert find_receipt(store, "demo", 1, "audit_data") is not None
    assert verify_store(store, "demo").faults == []


def test_two_writers_of_one_blob_both_succeed_while_a_reader_sees_it_whole_or_not_at_all(
    uri: str, source: Path, tmp_path: Path
) -> None:
    store = open_store(uri)
    content = source.read_bytes()
    name = f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    writers = [start(lambda: open_store(uri).put_blob(source, BYTES)) for _ in range(2)]
    sizes: set[int] = set()
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(wait, writer) for writer in writers]
        while not all(future.done() for future in ended):
            try:
                sizes.add(store.measure(name).size)
            except FileNotFoundError:
                sizes.add(0)
            time.sleep(0.05)
    assert [future.result() for future in ended] == [0, 0]
    assert sizes <= {0, len(content)}
    assert store.list_names("blobs/") == [name]
    assert store.measure(name).digest == f"sha256:{name.rpartition('/')[2]}"


def test_a_reader_meets_no_fault_at_any_moment_while_a_run_is_published(
    uri: str, snapshot: Path, data_file: Path, tmp_path: Path
) -> None:
    store = open_store(uri)
    writer = start(lambda: publish_run_into(open_store(uri), tmp_path, snapshot, data_file, transactions=3))
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(wait, writer)
        while not ended.done():
            assert {fault.path for fault in verify_store(store).faults} == {"runs/here"}
    assert ended.result() == 0
    report = verify_store(store, "demo")
    assert (report.faults, report.receipts) == ([], 9)


def test_a_blob_that_another_tool_stored_in_parts_is_judged_by_its_bytes_and_not_by_its_etag(
    uri: str, proxy: FaultProxy, seaweedfs_server: S3Server
) -> None:
    store, client = open_store(uri), seaweedfs_server.client()
    for harmed in (False, True):
        content = os.urandom(6 * MIB)
        harm = bytes([content[5 * MIB] ^ 1]) if harmed else b""
        key = f"{uri.removeprefix('s3://artifacts/')}/blobs/sha256/{hashlib.sha256(content).hexdigest()}"
        upload = client.create_multipart_upload(Bucket="artifacts", Key=key)["UploadId"]
        parts = []
        for number, body in enumerate((content[: 5 * MIB], harm + content[5 * MIB + len(harm) :]), start=1):
            part = client.upload_part(Bucket="artifacts", Key=key, UploadId=upload, PartNumber=number, Body=body)
            parts.append({"PartNumber": number, "ETag": part["ETag"]})
        client.complete_multipart_upload(Bucket="artifacts", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
        assert client.head_object(Bucket="artifacts", Key=key)["ETag"].endswith('-2"')
        if harm:
            with pytest.raises(IntegrityError, match="is corrupt: expected"):
                store.put_blob(content, BYTES)
        else:
            assert store.get_bytes(store.put_blob(content, BYTES)) == content
    assert not [line for line in proxy.requests if line.startswith(b"PUT") and b"/blobs/" in line]


def test_a_full_disk_leaves_nothing_behind_and_the_same_command_succeeds_later(
    store: Store, source: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=18m", "tmpfs", disk], check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        descriptor = store.put_blob(source, BYTES)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(4 * MIB))
        with pytest.raises(Retryable, match="No space left on device; free some space"):
            store.get_file(descriptor, disk / "copy")
        assert os.listdir(disk) == ["ballast"]
        ballast.unlink()
        store.get_file(descriptor, disk / "copy")
        assert (disk / "copy").read_bytes() == source.read_bytes()
    finally:
        subprocess.run([shutil.which("umount") or "umount", disk], check=True)


def test_a_file_that_changes_while_it_is_stored_is_not_stored(store: Store, proxy: FaultProxy, source: Path) -> None:
    def change(line: bytes) -> None:
        if line.startswith(b"POST") and b"uploads" in line:
            with source.open("r+b") as file:
                file.seek(12 * MIB)
                file.write(b"changed")

    proxy.on_request = change
    with pytest.raises(Retryable, match="changed while it was stored"):
        store.put_blob(source, BYTES)
    proxy.on_request = None
    assert store.list_names("blobs/") == []
    assert store.get_bytes(store.put_blob(source, BYTES)) == source.read_bytes()


class WithoutChecksums:
    """A client of a server that neither compares nor states the SHA-256 of a part."""

    def __init__(self, client: S3Client) -> None:
        self.client = client

    def __getattr__(self, name: str) -> object:
        return getattr(self.client, name)

    def upload_part(self, *, ChecksumSHA256: str, **request: object) -> dict[str, object]:
        assert ChecksumSHA256
        return {"ETag": self.client.upload_part(**request)["ETag"]}


def test_where_the_server_compares_nothing_the_bytes_are_signed_and_hashed_again(
    uri: str, proxy: FaultProxy, source: Path
) -> None:
    connection = connect("artifacts")
    silent = cast(S3Client, WithoutChecksums(connection.client))
    # a client that signs no bytes must not be used here: it has no method at all
    store = S3Store(uri, connection=replace(connection, client=silent, part_client=cast(S3Client, object())))

    def change(line: bytes) -> None:
        if line.startswith(b"POST") and b"uploads" in line:
            with source.open("r+b") as file:
                file.seek(12 * MIB)
                file.write(b"changed")

    proxy.on_request = change
    with pytest.raises(Retryable, match="changed while it was stored"):
        store.put_blob(source, BYTES)
    proxy.on_request = None
    assert store.list_names("blobs/") == []
    assert not connection.compares.is_set()


def test_where_the_server_compares_bytes_are_hashed_for_no_signature_after_the_first_part(
    store: Store, proxy: FaultProxy, source: Path
) -> None:
    store.put_blob(source, BYTES)
    heads = [head.lower() for head in proxy.heads if is_part(head)]
    assert all(b"x-amz-checksum-sha256" in head and b"authorization" in head for head in heads)
    again = source.with_name("again")
    again.write_bytes(os.urandom(17 * MIB))
    before = len(proxy.heads)
    assert store.get_bytes(store.put_blob(again, BYTES)) == again.read_bytes()
    later = [head.lower() for head in proxy.heads[before:] if is_part(head)]
    assert len(later) == 4
    assert all(b"x-amz-content-sha256: unsigned-payload" in head for head in later)
    for head in later:
        signed = head.split(b"signedheaders=", 1)[1].split(b",", 1)[0]
        assert b"x-amz-checksum-sha256" in signed.split(b";")


@pytest.mark.parametrize("write", [1, 3])
def test_a_server_whose_answer_is_lost_while_it_is_tried_out_is_not_refused(
    uri: str, proxy: FaultProxy, write: int
) -> None:
    """The repeated request meets its own success: the first creation, or the replacement after a refused second."""
    writes = iter(range(1, 100))
    is_lost: Callable[[bytes], bool] = lambda line: (  # noqa: E731
        line.startswith(b"PUT") and b"/staging/" in line and next(writes) == write
    )
    proxy.faults.append(Fault("lose_answer", 1, is_lost))
    store = open_store(uri, create=True)
    assert proxy.faults[0].hits == 1
    assert store.list_names() == ["runs/here"]


def test_what_a_killed_opening_left_is_no_fault_and_is_cleared_when_old(
    store: Store, monkeypatch: pytest.MonkeyPatch, seaweedfs_server: S3Server
) -> None:
    store.delete_object("runs/here")
    bucket, _, prefix = store.uri.removeprefix("s3://").partition("/")
    seaweedfs_server.client().put_object(Bucket=bucket, Key=f"{prefix}/staging/probe", Body=b"second")
    report = verify_store(store)
    assert (report.faults, report.unreferenced) == ([], ["staging/probe"])
    assert store.clear_stale_staging() == 0
    monkeypatch.setattr("longstraw_core.artifacts.s3_store.ABANDONED_AFTER", timedelta(seconds=-60))
    assert store.clear_stale_staging() == 1
    assert store.list_names() == []


class _ChunkedHandler(BaseHTTPRequestHandler):
    """An S3 server behind something that sends bodies in chunks and so states no length."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        listing = "list-type" in self.path
        body = b"<ListBucketResult><Contents><Key>p/x</Key></Contents></ListBucketResult>" if listing else b"content"
        ranged = not listing and "/whole" not in self.path
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
        self.send_header("ETag", '"0"')
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_body_without_a_stated_length_is_read_or_refused_in_words(
    seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _ChunkedHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in seaweedfs_server.environment(f"http://127.0.0.1:{server.server_port}").items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://artifacts/p")
        size, digest = 7, f"sha256:{hashlib.sha256(b'content').hexdigest()}"
        assert store.get_bytes(Descriptor(uri="runs/x", digest=digest, size=size, media_type=BYTES)) == b"content"
        with pytest.raises(SpecError, match="ignores ranges"):
            store.get_bytes(Descriptor(uri="runs/whole", digest=digest, size=size, media_type=BYTES))
        with pytest.raises(SpecError, match="lists objects without name, size or time"):
            store.list_names("")
        server.shutdown()


class _RedirectHandler(BaseHTTPRequestHandler):
    """A front that sends everybody to HTTPS, as many do; where it points to, nobody must go with our requests."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"https://elsewhere.invalid{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_server_that_redirects_elsewhere_is_refused_in_words(
    seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _RedirectHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in seaweedfs_server.environment(f"http://127.0.0.1:{server.server_port}").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SpecError, match="redirects to another place; name that one in AWS_ENDPOINT_URL_S3"):
            open_store("s3://artifacts/p")
        server.shutdown()

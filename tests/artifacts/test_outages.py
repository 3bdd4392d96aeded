"""Given a storage that fails, when a store is verified or cleaned, then nobody is accused and nothing is deleted."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from longstraw_core.artifacts import FileStore, collect_garbage, open_store, verify_directory, verify_store
from longstraw_core.artifacts.files import Measured
from longstraw_core.artifacts.store import Store
from longstraw_core.cli.main import main
from longstraw_core.spec.errors import LongStrawError, Retryable, SpecError
from tests.artifacts.conftest import publish_run_into
from tests.servers.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.servers.seaweedfs import S3Server

OUTAGES = [("slow_down", 75), ("cut_answer", 75), ("silent", 75), ("forbidden", 2)]
AFFECTED: list[Callable[[bytes], bool]] = [
    lambda line: b"/blobs/" in line,
    lambda line: b"/runs/" in line and not line.startswith(b"PUT"),
    lambda line: b"list-type" in line and b"runs" in line,
    lambda line: b"list-type" in line and b"policies" in line,
    lambda line: b"/policies/" in line and not line.startswith(b"PUT"),
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def proxy(seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, and a store that gives up quickly."""
    monkeypatch.setattr("longstraw_core.artifacts.s3_reader.TOTAL_ATTEMPTS", 1)
    monkeypatch.setattr("longstraw_core.artifacts.s3_connection.READ_TIMEOUT_SECONDS", 0.5)
    with fault_proxy(seaweedfs_server.endpoint) as running:
        for name, value in (seaweedfs_server.environment(running.endpoint) | {"AWS_MAX_ATTEMPTS": "1"}).items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def store(proxy: FaultProxy, seaweedfs_server: S3Server, snapshot: Path, data_file: Path, tmp_path: Path) -> Store:
    """A store with a run, a policy and something that a cleaning would delete."""
    store = open_store(f"s3://artifacts/outage-{os.getpid()}-{tmp_path.name}", create=True)
    publish_run_into(store, tmp_path, snapshot, data_file, transactions=1)
    from longstraw_core.artifacts import advance_policy, find_receipt, read_receipt
    from longstraw_core.spec import CheckpointManifest

    found = find_receipt(store, "demo", 1, "manifest_checkpoint")
    assert found is not None
    checkpoint = read_receipt(store, found).predicate.outputs["checkpoint"]
    advance_policy(store, "main", checkpoint, CheckpointManifest.model_validate_json(store.get_bytes(checkpoint)))
    store.put_blob(b"garbage", "text/plain")
    return store


@pytest.mark.parametrize(("kind", "code"), OUTAGES)
@pytest.mark.parametrize("affected", range(len(AFFECTED)))
def test_an_outage_of_s3_ends_with_the_storages_exit_code_and_never_as_tampering(
    store: Store, proxy: FaultProxy, kind: str, code: int, affected: int
) -> None:
    before = store.list_names()
    proxy.faults = [Fault(kind, 10_000, AFFECTED[affected])]
    for command in (("verify", store.uri), ("gc", "--store", store.uri, "--keep-runs", "1", "--grace-hours", "0")):
        result = invoke(*command)
        assert result.exit_code == code, result.output
        assert "do not use these artifacts" not in result.output
    assert proxy.faults[0].hits
    proxy.faults = []
    assert store.list_names() == before
    assert verify_store(store).faults == []


def test_an_outage_that_begins_at_the_second_look_deletes_nothing(store: Store, proxy: FaultProxy) -> None:
    before = store.list_names()
    listings: list[bytes] = []

    def break_down(line: bytes) -> None:
        if b"list-type" in line and b"blobs" in line:
            listings.append(line)
            if len(listings) == 2:
                proxy.faults = [Fault("slow_down", 10_000)]

    proxy.on_request = break_down
    with pytest.raises(Retryable):
        collect_garbage(store, keep_runs=0, grace_seconds=0)
    proxy.on_request, proxy.faults = None, []
    assert store.list_names() == before


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, Retryable), (errno.ESTALE, Retryable), (errno.EACCES, SpecError)]
)
def test_a_file_system_that_fails_is_no_fault_of_the_artifacts(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[LongStrawError]
) -> None:
    class Broken(FileStore):
        broken: str

        def open_object(self, name: str):
            if name.startswith(self.broken):
                raise OSError(number, os.strerror(number))
            return super().open_object(name)

        def measure(self, name: str) -> Measured:
            with self.open_object(name):
                return super().measure(name)

    store = Broken(run_directory / "store")
    for store.broken in ("blobs/", "runs/demo/0001/train"):
        with pytest.raises(error, match=os.strerror(number)):
            verify_store(store)
        before = store.list_names()
        with pytest.raises(error, match=os.strerror(number)):
            collect_garbage(store, keep_runs=1, grace_seconds=0)
        assert store.list_names() == before
    real = os.readv

    def readv(opened: int, buffers: list[memoryview]) -> int:
        if "optimizer" in os.readlink(f"/proc/self/fd/{opened}") or "train.log" in os.readlink(
            f"/proc/self/fd/{opened}"
        ):
            raise OSError(number, os.strerror(number))
        return real(opened, buffers)

    monkeypatch.setattr(os, "readv", readv)
    with pytest.raises(error, match=r"logs/train\.log.*" + os.strerror(number)):
        verify_directory(run_directory)


def test_what_is_gone_or_no_file_is_still_a_fault(run_directory: Path) -> None:
    store = FileStore(run_directory / "store")
    first, second = sorted((store.root / "blobs" / "sha256").iterdir())[:2]
    first.unlink()
    second.unlink()
    second.mkdir()
    kinds = {fault.path: fault.kind for fault in verify_store(store).faults if fault.path.startswith("blobs/")}
    assert kinds[f"blobs/sha256/{first.name}"] == "missing"
    assert kinds[f"blobs/sha256/{second.name}"] == "directory"


def test_a_forged_size_of_a_manifest_is_a_fault_and_no_usage_error(run_directory: Path, receipt_path) -> None:
    import json

    from longstraw_core.spec import canonical_json

    path = receipt_path(run_directory, 2, "manifest_checkpoint")
    value = json.loads(path.read_bytes())
    value["predicate"]["outputs"]["checkpoint"]["size"] = 1 << 50
    path.unlink()
    path.write_bytes(canonical_json(value))
    assert "malformed" in {fault.kind for fault in verify_store(FileStore(run_directory / "store")).faults}

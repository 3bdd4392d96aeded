"""Given a writer killed at any moment, then nothing half-written is visible and the same command completes."""

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    FileStore,
    list_receipts,
    materialize_tree,
    publish_tree,
    read_receipt,
    seal_directory,
    verify_directory,
    verify_store,
)
from longstraw_core.artifacts.receipts import MEDIA_TYPE_RECEIPT
from longstraw_core.artifacts.store import Store

SYSTEM_CALLS = ("open", "write", "fsync", "link", "unlink", "rename", "mkdir", "fchmod", "chmod")


def start(function: Callable[[], object]) -> int:
    """Run a function in a forked process and return its id; the process exits 0 when the function returned."""
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return process


def wait(process: int) -> int:
    """Exit code of a process, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_before_call(number: int, function: Callable[[], object]) -> bool:
    """Run a function in a process that kills itself at its `number`th system call; False when it finished before.

    A write is cut in the middle: half of its bytes arrive.
    """

    def armed() -> None:
        remaining = [number]

        def wrap(name: str, original: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **named: object) -> object:
                remaining[0] -= 1
                if remaining[0] == 0:
                    if name == "write":
                        descriptor, content = arguments
                        os_write(descriptor, memoryview(content)[: len(content) // 2])  # type: ignore[arg-type]
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **named)

            return call

        os_write = os.write
        for name in SYSTEM_CALLS:
            setattr(os, name, wrap(name, getattr(os, name)))
        function()

    code = wait(start(armed))
    assert code in (0, -signal.SIGKILL)
    return code != 0


def assert_nothing_half_written(store: Store) -> None:
    """Whatever is visible is whole: hashlib agrees with each blob's name, each receipt parses, its outputs exist."""
    root = FileStore(Path(store.uri.removeprefix("file://"))).root
    for path in (root / "blobs" / "sha256").glob("*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        assert path.stat().st_mode & 0o777 == 0o444
    for place in list_receipts(store):
        receipt = read_receipt(store, store.describe_object(place.name, MEDIA_TYPE_RECEIPT))
        for output in receipt.predicate.outputs.values():
            store.get_bytes(output)
    report = verify_store(store)
    assert report.faults == []


def test_a_publication_killed_at_every_system_call_is_invisible_or_whole(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)

    def publish() -> None:
        blob = store.put_blob(b"content" * 100, "application/octet-stream")
        store.create_object("runs/r/x", blob.digest.encode(), "text/plain")

    call = 1
    while killed_before_call(call, publish):
        for path in (store.root / "blobs" / "sha256").glob("*"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        if store.exists("runs/r/x"):
            (blob,) = (store.root / "blobs" / "sha256").iterdir()
            assert (store.root / "runs/r/x").read_text() == f"sha256:{blob.name}"
        store.clear_stale_staging()
        assert list((store.root / "staging").glob("*")) == []
        call += 1
    assert call > 15
    publish()


def test_a_run_killed_at_many_system_calls_resumes_and_verifies(
    tmp_path: Path, snapshot: Path, data_file: Path, make_run
) -> None:
    chosen = random.Random(0)
    workdir = tmp_path / "run"
    workdir.mkdir()
    FileStore(workdir / "store", create=True)
    call, kills = 1, 0
    while killed_before_call(call, lambda: make_run(workdir, snapshot, data_file)):
        assert_nothing_half_written(FileStore(workdir / "store"))
        kills += 1
        call += chosen.randint(1, 25)
    assert kills > 15
    seal_directory(workdir)
    assert verify_directory(workdir).faults == []


def test_a_writer_killed_at_random_moments_leaves_a_store_that_a_rerun_completes(
    tmp_path: Path, snapshot: Path, data_file: Path, make_run
) -> None:
    chosen = random.Random(1)
    killed = 0
    for attempt in range(15):
        workdir = tmp_path / f"run-{attempt}"
        workdir.mkdir()
        store = FileStore(workdir / "store", create=True)
        process = start(lambda workdir=workdir: make_run(workdir, snapshot, data_file, transactions=20))
        time.sleep(chosen.uniform(0.005, 0.15))
        os.kill(process, signal.SIGKILL)
        killed += wait(process) == -signal.SIGKILL
        assert_nothing_half_written(store)
    assert killed > 5
    make_run(workdir, snapshot, data_file)
    seal_directory(workdir)
    assert verify_directory(workdir).ok


def test_sealing_killed_at_every_system_call_never_leaves_a_seal_that_misses_a_file(run_directory: Path) -> None:
    (run_directory / "more.txt").write_text("more")
    call = 1
    while killed_before_call(call, lambda: seal_directory(run_directory)):
        indexes = list(run_directory.glob("complete.*"))
        assert len(indexes) <= 1
        if verify_directory(run_directory).ok:  # killed after the new index was in place
            assert '"path":"more.txt"' in indexes[0].read_text()
        call += 1
    assert call > 5
    assert verify_directory(run_directory).ok


def test_materializing_killed_at_every_system_call_never_shows_a_partial_tree(store: FileStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one").write_bytes(b"1" * 1000)
    (source / "two").write_bytes(b"2" * 1000)
    descriptor = publish_tree(store, source)
    destination = tmp_path / "out"
    call = 1
    while killed_before_call(call, lambda: materialize_tree(store, descriptor, destination)):
        assert not destination.exists()
        call += 1
    assert call > 5
    assert sorted(path.name for path in destination.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("writers", [2, 4])
def test_processes_that_publish_the_same_run_at_once_all_succeed_while_readers_see_only_whole_objects(
    tmp_path: Path, snapshot: Path, data_file: Path, make_run, writers: int
) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    store = FileStore(workdir / "store", create=True)
    processes = [start(lambda: make_run(workdir, snapshot, data_file, transactions=5)) for _ in range(writers)]
    for _ in range(10):
        for path in (store.root / "blobs" / "sha256").glob("*"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        store.clear_stale_staging()
    assert [wait(process) for process in processes] == [0] * writers
    assert verify_store(store).ok

"""Given a store with many runs, when garbage is collected, then what is kept verifies and nothing else is left."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    FileStore,
    advance_policy,
    collect_garbage,
    register_snapshot,
    verify_store,
)
from longstraw_core.artifacts.files import FoundFile
from longstraw_core.artifacts.receipts import list_receipts
from longstraw_core.artifacts.store import blob_name
from longstraw_core.spec import CheckpointManifest, Descriptor
from longstraw_core.spec.errors import IntegrityError
from tests.artifacts.conftest import publish_run_into

DAY = 86_400.0


@pytest.fixture
def runs(store: FileStore, snapshot: Path, data_file: Path, tmp_path: Path) -> dict[str, Descriptor]:
    """Five runs, the oldest first, each an hour after the one before; the last is continued from the first."""
    published: dict[str, Descriptor] = {}
    for number, run in enumerate(("oldest", "second", "third", "fourth", "newest")):
        parent = published["oldest"] if run == "newest" else None
        published[run] = publish_run_into(
            store, tmp_path, snapshot, data_file, run=run, transactions=2, parent=parent, lineage=2 if parent else 0
        )
        age(store, 10 * DAY - number * 3600, only_new=True)
    return published


def age(store: FileStore, seconds: float, *, only_new: bool = False) -> None:
    """Make every file of a store look that old."""
    then = time.time() - seconds
    for path in store.root.rglob("*"):
        if path.is_file() and not (only_new and path.stat().st_mtime < time.time() - DAY):
            os.utime(path, (then, then))


def names(store: FileStore) -> set[str]:
    return {place.run for place in list_receipts(store)}


def test_old_runs_go_and_what_is_kept_verifies(store: FileStore, runs: dict[str, Descriptor]) -> None:
    manifest = CheckpointManifest.model_validate_json(store.get_bytes(runs["second"]))
    advance_policy(store, "main", runs["second"], manifest)
    stray = store.put_blob(b"left by a killed stage", "text/plain")
    young = store.put_blob(b"of a stage that runs now", "text/plain")
    os.utime(store.root / stray.uri, (1, 1))
    before = set(store.list_names())
    planned = collect_garbage(store, keep_runs=2, grace_seconds=DAY, dry_run=True)
    assert set(store.list_names()) == before
    done = collect_garbage(store, keep_runs=2, grace_seconds=DAY)
    assert (done.receipts, done.blobs, done.kept_runs) == (planned.receipts, planned.blobs, planned.kept_runs)
    assert done.kept_runs == ["newest", "fourth"]
    assert names(store) == {"newest", "fourth"}
    assert stray.uri in done.blobs
    assert done.young == 1
    assert store.exists(young.uri)
    report = verify_store(store)
    assert report.faults == []
    assert report.unreferenced == [young.uri]
    # kept without their runs: the policy's checkpoint, and the one that the newest run was continued from
    assert store.exists(runs["second"].uri)
    assert store.exists(runs["oldest"].uri)
    assert not store.exists(runs["third"].uri)
    assert set(store.list_names()) == before - set(done.receipts) - set(done.blobs)
    assert collect_garbage(store, keep_runs=2, grace_seconds=DAY).blobs == []


def test_a_registered_snapshot_stays_when_every_run_goes(
    store: FileStore, runs: dict[str, Descriptor], snapshot: Path
) -> None:
    registered = register_snapshot(store, snapshot)
    assert register_snapshot(store, snapshot) == registered
    done = collect_garbage(store, keep_runs=0, grace_seconds=DAY)
    assert len(done.dropped_runs) == 5
    age(store, 10 * DAY)
    collect_garbage(store, keep_runs=0, grace_seconds=DAY)
    assert store.list_names("blobs/") == [blob_name(registered.digest)]
    assert verify_store(store).faults == []


def test_young_runs_are_kept_beyond_the_number(store: FileStore, runs: dict[str, Descriptor]) -> None:
    done = collect_garbage(store, keep_runs=0, grace_seconds=11 * DAY)
    assert done.dropped_runs == []
    assert done.blobs == []


def test_nothing_is_deleted_when_something_that_is_kept_has_a_fault(
    store: FileStore, runs: dict[str, Descriptor]
) -> None:
    (store.root / runs["newest"].uri).unlink()
    before = store.list_names()
    with pytest.raises(IntegrityError, match="nothing was deleted"):
        collect_garbage(store, keep_runs=1, grace_seconds=DAY)
    assert store.list_names() == before


def test_what_becomes_reachable_between_the_two_looks_stays(
    store: FileStore, runs: dict[str, Descriptor], snapshot: Path, data_file: Path, tmp_path: Path
) -> None:
    """A policy moves to a checkpoint, and a run begins from another, that the first look found to be garbage."""
    looks: list[str] = []

    class Racing(FileStore):
        def walk(self, prefix: str = "") -> Iterator[FoundFile]:
            found = list(super().walk(prefix))
            if prefix == "blobs/sha256/":
                looks.append(prefix)
                if len(looks) == 1:
                    manifest = CheckpointManifest.model_validate_json(store.get_bytes(runs["second"]))
                    advance_policy(store, "main", runs["second"], manifest)
                    publish_run_into(store, tmp_path, snapshot, data_file, run="late", parent=runs["third"], lineage=2)
            yield from found

    done = collect_garbage(Racing(store.root), keep_runs=1, grace_seconds=DAY)
    assert len(looks) == 2
    assert {"second", "third", "fourth"} <= set(done.dropped_runs)
    assert store.exists(runs["second"].uri)
    assert store.exists(runs["third"].uri)
    assert not store.exists(runs["fourth"].uri)
    assert verify_store(store).faults == []


def test_what_becomes_reachable_while_blobs_are_deleted_stays_from_the_next_batch_on(
    store: FileStore, runs: dict[str, Descriptor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longstraw_core.artifacts.garbage.BATCH_BLOBS", 1)
    needed = {run: closure(store, runs[run]) for run in ("second", "third", "fourth")}
    deleted: list[str] = []
    moved: list[str] = []
    original = store.delete_object

    def move_after_the_first_blob(name: str) -> None:
        original(name)
        if name.startswith("blobs/"):
            deleted.append(name)
            if len(deleted) == 1:
                moved.append(next(run for run in needed if name not in needed[run]))
                manifest = CheckpointManifest.model_validate_json(store.get_bytes(runs[moved[0]]))
                advance_policy(store, "main", runs[moved[0]], manifest)

    monkeypatch.setattr(store, "delete_object", move_after_the_first_blob)
    planned = collect_garbage(store, keep_runs=1, grace_seconds=DAY, dry_run=True).blobs
    done = collect_garbage(store, keep_runs=1, grace_seconds=DAY)
    assert needed[moved[0]] & set(planned)
    assert not needed[moved[0]] & set(deleted)
    assert sorted(done.blobs) == sorted(deleted)
    assert set(deleted) == set(planned) - needed[moved[0]]
    assert verify_store(store).faults == []


def closure(store: FileStore, checkpoint: Descriptor | None) -> set[str]:
    """Names of all blobs that a checkpoint and its parents need."""
    names: set[str] = set()
    while checkpoint is not None:
        manifest = CheckpointManifest.model_validate_json(store.get_bytes(checkpoint))
        names |= {checkpoint.uri, manifest.tree.uri, *(blob_name(file.digest) for file in manifest.files)}
        checkpoint = manifest.parent
    return names


def test_a_collection_that_was_killed_is_continued_by_the_next(
    store: FileStore, runs: dict[str, Descriptor], monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    original = store.delete_object

    def delete(name: str) -> None:
        if len(deleted) == 7:
            raise KeyboardInterrupt
        deleted.append(name)
        original(name)

    monkeypatch.setattr(store, "delete_object", delete)
    with pytest.raises(KeyboardInterrupt):
        collect_garbage(store, keep_runs=1, grace_seconds=DAY)
    assert all(name.startswith("runs/") for name in deleted)
    assert verify_store(store).faults == []  # consumers went before producers, blobs not yet
    monkeypatch.undo()
    collect_garbage(store, keep_runs=1, grace_seconds=DAY)
    assert names(store) == {"newest"}
    assert verify_store(store).faults == []


def test_journals_of_runs_that_are_gone_stay_until_they_are_closed_and_old(store: FileStore) -> None:
    """Their runs may have lost their receipts to an earlier collection, which kept open journals or was killed."""
    done = ["0001/0000-intent.json", "0001/0001-closed.json", "heartbeat/00000001.json"]
    for run, last in (("closed", "0002/0000-closed.json"), ("open", "0002/0000-intent.json")):
        for name in (*done, last):
            store.create_object(f"cluster/{run}/0001/train/{name}", b"{}", "application/json")
    age(store, 10 * DAY)
    store.create_object("cluster/starting/0001/train/0001/0000-closed.json", b"{}", "application/json")
    before = set(store.list_names())
    expected = sorted(name for name in before if name.startswith("cluster/closed/"))
    assert collect_garbage(store, keep_runs=0, grace_seconds=DAY, dry_run=True).journals == expected
    assert set(store.list_names()) == before
    assert collect_garbage(store, keep_runs=0, grace_seconds=DAY).journals == expected
    assert set(store.list_names()) == before - set(expected)
    store.create_object("cluster/open/0001/train/0002/0001-closed.json", b"{}", "application/json")
    age(store, 10 * DAY)
    collect_garbage(store, keep_runs=0, grace_seconds=DAY)
    assert store.list_names("cluster/") == []


def test_journals_of_kept_runs_stay(store: FileStore, runs: dict[str, Descriptor]) -> None:
    for run in ("newest", "oldest"):
        store.create_object(f"cluster/{run}/0001/train/0001/0000-closed.json", b"{}", "application/json")
    age(store, 10 * DAY, only_new=True)
    report = collect_garbage(store, keep_runs=len(runs) - 1, grace_seconds=DAY)
    assert report.dropped_runs == ["oldest"]
    assert report.journals == ["cluster/oldest/0001/train/0001/0000-closed.json"]
    assert store.list_names("cluster/") == ["cluster/newest/0001/train/0001/0000-closed.json"]

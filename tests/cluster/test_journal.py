"""The ownership journal: what it says after any crash, to any reader, in a store of either kind."""

from pathlib import Path

import pytest

from longstraw_core.artifacts import FileStore, collect_garbage, verify_store
from longstraw_core.artifacts.journals import parse_journal_name
from longstraw_core.artifacts.s3_store import S3Store
from longstraw_core.artifacts.store import Store
from longstraw_core.cluster.journal import (
    Attempt,
    AttemptPlace,
    Closed,
    Deleted,
    Owned,
    Released,
    open_attempt,
    read_attempt,
    read_attempts,
)
from longstraw_core.spec import IntegrityError, SpecError, sha256_digest
from tests.artifacts.conftest import publish_run_into
from tests.servers.seaweedfs import S3Server


@pytest.fixture(params=["file", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of each kind."""
    if request.param == "file":
        return FileStore(tmp_path / "journals", create=True)
    server: S3Server = request.getfixturevalue("seaweedfs_server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return S3Store(f"s3://artifacts/journals-{tmp_path.name}", create=True)


def begin(store: Store, *, run: str = "demo", stage: str = "train") -> Attempt:
    return open_attempt(
        store,
        run=run,
        transaction=1,
        stage=stage,  # type: ignore[arg-type]
        plan=sha256_digest(b"plan"),
        namespace="team",
        name="ls-train-0123456789",
        launcher=None,
    )


def test_what_was_appended_is_read_back(any_store: Store) -> None:
    attempt = begin(any_store)
    attempt.append(Owned(object="Service", uid="s"))
    attempt.append(Owned(object="Job", uid="j"))
    attempt.append(Deleted(uid="j"))
    (read,) = read_attempts(any_store, "demo")
    assert read.intent == attempt.intent
    assert (read.live, read.gone, read.closed) == ({"s": "Service"}, {"j"}, False)
    attempt.append(Released(uid="s", attempt=2))
    attempt.append(Closed(reason="done"))
    (read,) = read_attempts(any_store, "demo")
    assert (read.live, read.closed) == ({}, True)


def test_attempts_are_numbered_and_of_different_stages_apart(any_store: Store) -> None:
    places = [begin(any_store).place, begin(any_store).place, begin(any_store, stage="sample").place]
    assert [(place.stage, place.attempt) for place in places] == [("train", 1), ("train", 2), ("sample", 1)]
    assert len({attempt.intent.token for attempt in read_attempts(any_store, "demo")}) == 3


def test_two_writers_append_and_nothing_is_lost(any_store: Store) -> None:
    launcher = begin(any_store)
    person = read_attempt(any_store, launcher.place)
    assert person is not None
    launcher.append(Owned(object="Service", uid="s"))
    person.append(Owned(object="Job", uid="j"))  # the same number, the same kind
    launcher.append(Deleted(uid="s"))
    person.append(Closed(reason="cleaned up"))
    (read,) = read_attempts(any_store, "demo")
    assert read.owned == {"s": "Service", "j": "Job"}
    assert (read.gone, read.closed) == ({"s"}, True)


def test_any_prefix_of_the_records_is_a_journal(tmp_path: Path) -> None:
    full = FileStore(tmp_path / "full", create=True)
    attempt = begin(full)
    for record in (Owned(object="Service", uid="s"), Owned(object="Job", uid="j"), Deleted(uid="j"), Deleted(uid="s")):
        attempt.append(record)
    names = full.list_names(attempt.place.prefix)
    for length in range(1, len(names) + 1):
        part = FileStore(tmp_path / f"part-{length}", create=True)
        for name in names[:length]:
            content = (full.root / name).read_bytes()
            part.create_object(name, content, "application/json")
        (read,) = read_attempts(part, "demo")
        assert set(read.owned) == {"s", "j"} if length > 2 else len(read.owned) == length - 1
        assert not read.closed


@pytest.mark.parametrize(
    "content", [b"{}", b"not json", b'{"kind":"owned"}', b'{"kind":"owned","object":"Node","uid":"x","adopted":false}']
)
def test_a_record_that_is_none_is_refused(content: bytes, store: FileStore) -> None:
    attempt = begin(store)
    store.create_object(f"{attempt.place.prefix}0001-owned.json", content, "application/json")
    with pytest.raises(IntegrityError, match="0001-owned"):
        list(read_attempts(store, "demo"))


@pytest.mark.parametrize("run", ["../up", "a/b", "", ".hidden", "x" * 129])
def test_a_name_that_is_none_is_refused(run: str, store: FileStore) -> None:
    with pytest.raises(SpecError):
        list(read_attempts(store, run))


def test_an_attempt_without_intent_is_none(store: FileStore) -> None:
    assert read_attempt(store, AttemptPlace("demo", 1, "train", 7)) is None


def test_names_are_parsed_or_refused() -> None:
    good = [
        "cluster/r/0001/train/0001/0000-intent.json",
        "cluster/r/0001/train/heartbeat/00000001.json",
        f"cluster/r/0001/sample/request-{'0' * 64}.json",
    ]
    assert all(parse_journal_name(name) for name in good)
    bad = ["cluster/r/0001/other/0001/0000-intent.json", "cluster/r/0001/train/0001/0000-other.json", "cluster/r/x"]
    assert not any(parse_journal_name(name) for name in bad)


def test_a_journal_belongs_in_a_store_and_other_files_beside_it_do_not(
    store: FileStore, tmp_path: Path, snapshot_and_data: tuple[Path, Path]
) -> None:
    publish_run_into(store, tmp_path, *snapshot_and_data)
    begin(store).append(Closed(reason="done"))
    assert verify_store(store).ok
    store.create_object("cluster/demo/notes.txt", b"x", "text/plain")
    assert [fault.path for fault in verify_store(store).faults] == ["cluster/demo/notes.txt"]


def test_garbage_collection_drops_closed_journals_and_keeps_open_ones(
    store: FileStore, tmp_path: Path, snapshot_and_data: tuple[Path, Path]
) -> None:
    for number, run in enumerate(("closed", "open")):
        (tmp_path / str(number)).mkdir()
        publish_run_into(store, tmp_path / str(number), *snapshot_and_data, run=run)
        begin(store, run=run).append(Closed(reason="done"))
    begin(store, run="open", stage="sample").append(Owned(object="Job", uid="j"))
    report = collect_garbage(store, keep_runs=0, grace_seconds=-1.0)
    assert sorted(report.dropped_runs) == ["closed", "open"]
    assert {parse_journal_name(name).run for name in report.journals} == {"closed"}  # type: ignore[union-attr]
    assert list(read_attempts(store, "closed")) == []
    assert len(list(read_attempts(store, "open"))) == 2


@pytest.fixture
def snapshot_and_data(tmp_path: Path) -> tuple[Path, Path]:
    """A model directory and a data file."""
    directory = tmp_path / "snapshot"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    return directory, data

"""Finished parts of a stage: found again only whole and by the same execution, gone with the receipt or the run."""

from pathlib import Path

from longstraw_core.artifacts import FileStore, collect_garbage, verify_store
from longstraw_core.artifacts.finished_work import (
    clear_finished_work,
    finished_name,
    get_finished,
    place_of_finished,
    put_finished,
)

ONE, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def test_a_part_is_found_by_its_identity_until_the_stage_is_done(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)
    name = finished_name("run", 3, "sample", 12)
    assert name == "runs/run/0003/sample/finished/000012.jsonl"
    assert get_finished(store, name, ONE) is None
    put_finished(store, name, ONE, b"a\nb\n")
    assert get_finished(store, name, ONE) == b"a\nb\n"
    assert get_finished(store, name, OTHER) is None
    put_finished(store, name, OTHER, b"c\n")
    assert get_finished(store, name, OTHER) == b"c\n"
    assert get_finished(store, name, ONE) is None
    place = place_of_finished(name)
    assert place is not None
    assert (place.run, place.transaction, place.stage) == ("run", 3, "sample")
    assert place_of_finished("runs/run/0003/sample/finished/12.jsonl") is None
    assert place_of_finished("runs/run/0003/nothing/finished/000012.jsonl") is None
    clear_finished_work(store, "run", 3, "sample")
    assert store.list_names("runs/") == []


def test_a_part_is_no_fault_and_a_damaged_one_is_not_believed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)
    name = finished_name("run", 1, "sample", 0)
    put_finished(store, name, ONE, b"tokens\n")
    report = verify_store(store)
    assert report.faults == []
    assert report.unreferenced == [name]
    path = tmp_path / "store" / name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"tokens", b"t0kens"))
    assert get_finished(store, name, ONE) is None
    path.write_bytes(b"{}")
    assert get_finished(store, name, ONE) is None


def test_parts_are_deleted_with_their_run(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)
    put_finished(store, finished_name("run", 1, "sample", 0), ONE, b"x")
    assert collect_garbage(store, keep_runs=0, grace_seconds=3600.0).dropped_runs == []
    report = collect_garbage(store, keep_runs=0, grace_seconds=-1.0)
    assert (report.dropped_runs, report.receipts) == (["run"], [finished_name("run", 1, "sample", 0)])
    assert store.list_names("runs/") == []

"""Given a finished run and an attacker with write access, when any file is touched, then the file is named."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longstraw_core.artifacts import (
    FileStore,
    seal_directory,
    unseal_directory,
    verify_directory,
    verify_store,
)
from tests.artifacts.verification.tampering import blobs_of, files_of, named, overwrite


def test_an_untouched_run_verifies_wherever_it_is_moved(run_directory: Path) -> None:
    report = verify_directory(run_directory)
    assert report.faults == []
    assert report.ok
    assert report.receipts == 6
    assert report.unchecked == []
    assert report.blobs == len(blobs_of(run_directory))
    listed = [name for name in files_of(run_directory) if not name.startswith("complete.")]
    assert report.bytes == sum((run_directory / name).stat().st_size for name in listed)


def test_blob_names_are_the_hashlib_digest_of_their_bytes(run_directory: Path) -> None:
    for name in blobs_of(run_directory):
        assert Path(name).name == hashlib.sha256((run_directory / name).read_bytes()).hexdigest()


def test_one_flipped_byte_in_any_file_is_named(run_directory: Path) -> None:
    for name in files_of(run_directory):
        path = run_directory / name
        original = path.read_bytes()
        if not original:
            continue
        position = len(original) // 2
        overwrite(path, original[:position] + bytes([original[position] ^ 1]) + original[position + 1 :])
        report = verify_directory(run_directory)
        assert "changed" in named(report, name), name
        overwrite(path, original)
    assert verify_directory(run_directory).ok


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_any_byte_of_any_file_set_to_any_other_value_is_found(run_directory: Path, choice: st.DataObject) -> None:
    name = choice.draw(st.sampled_from([n for n in files_of(run_directory) if (run_directory / n).stat().st_size]))
    original = (run_directory / name).read_bytes()
    position = choice.draw(st.integers(0, len(original) - 1))
    flip = choice.draw(st.integers(1, 255))
    overwrite(run_directory / name, original[:position] + bytes([original[position] ^ flip]) + original[position + 1 :])
    try:
        assert named(verify_directory(run_directory), name)
    finally:
        overwrite(run_directory / name, original)


def test_without_the_index_the_store_alone_still_names_every_flipped_blob_and_receipt(run_directory: Path) -> None:
    store = FileStore(run_directory / "store")
    for name in files_of(run_directory / "store"):
        path = run_directory / "store" / name
        original = path.read_bytes()
        if not original:
            continue
        overwrite(path, original[:-1] + bytes([original[-1] ^ 4]))
        assert named(verify_store(store), name), name
        overwrite(path, original)


def test_any_truncated_file_is_named(run_directory: Path) -> None:
    for name in files_of(run_directory):
        path = run_directory / name
        original = path.read_bytes()
        if not original:
            continue
        overwrite(path, original[:-1])
        assert "changed" in named(verify_directory(run_directory), name), name
        overwrite(path, original)


def test_any_removed_file_is_named(run_directory: Path) -> None:
    for name in files_of(run_directory):
        path = run_directory / name
        original = path.read_bytes()
        path.unlink()
        report = verify_directory(run_directory)
        if name.startswith("complete."):
            assert [fault.kind for fault in report.faults] == ["incomplete"]
        else:
            assert "missing" in named(report, name), name
        path.write_bytes(original)


def test_any_file_replaced_by_a_symlink_to_the_same_bytes_is_named(run_directory: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files_of(run_directory)):
        path = run_directory / name
        elsewhere = tmp_path / f"elsewhere-{number}"
        os.rename(path, elsewhere)
        path.symlink_to(elsewhere)
        assert "symlink" in named(verify_directory(run_directory), name), name
        path.unlink()
        os.rename(elsewhere, path)


@pytest.mark.parametrize("directory", ["store", "store/blobs", "store/blobs/sha256", "store/runs/demo/0001", "logs"])
def test_a_directory_replaced_by_a_symlink_to_the_same_files_is_named(run_directory: Path, directory: str) -> None:
    os.rename(run_directory / directory, run_directory.parent / "elsewhere")
    (run_directory / directory).symlink_to(run_directory.parent / "elsewhere")
    report = verify_directory(run_directory)
    assert "symlink" in named(report, directory)
    if directory != "logs":
        assert len(report.faults) > 1


@pytest.mark.parametrize(
    "name",
    [
        "extra.txt",
        "logs/.hidden",
        "store/extra",
        "store/blobs/sha256/not-a-digest",
        "store/blobs/md5/" + "0" * 64,
        "store/runs/demo/0001/train/receipt.json.bak",
        "store/runs/demo/0001/unknown_stage/receipt.json",
        "store/runs/demo/0000/train/receipt.json",
        "store/runs/extra",
        "store/.lock",
    ],
)
def test_an_added_file_is_named(run_directory: Path, name: str) -> None:
    (run_directory / name).parent.mkdir(parents=True, exist_ok=True)
    (run_directory / name).write_text("added")
    report = verify_directory(run_directory)
    assert "extra" in named(report, name)
    if name.startswith("store/"):
        assert named(verify_store(FileStore(run_directory / "store")), name.removeprefix("store/")) == ["extra"]


def test_a_fifo_a_leftover_and_a_non_utf8_name_are_named_in_one_report(run_directory: Path) -> None:
    os.mkfifo(run_directory / "store" / "pipe")
    (run_directory / "store" / "staging" / "abc").write_bytes(b"half")
    with open(os.fsencode(run_directory / "logs") + b"/\xff", "wb") as file:
        file.write(b"x")
    report = verify_directory(run_directory)
    assert "special" in named(report, "store/pipe")
    assert named(report, "store/staging/abc") == ["extra"]
    assert named(report, "logs/\\udcff") == ["extra"]


def test_two_swapped_blobs_are_both_named(run_directory: Path) -> None:
    first, second = [name for name in blobs_of(run_directory) if (run_directory / name).stat().st_size][:2]
    one, two = (run_directory / first).read_bytes(), (run_directory / second).read_bytes()
    overwrite(run_directory / first, two)
    overwrite(run_directory / second, one)
    unseal_directory(run_directory)
    report = verify_directory(run_directory)
    assert "changed" in named(report, first)
    assert "changed" in named(report, second)


def test_every_fault_is_reported_with_expected_and_observed(run_directory: Path) -> None:
    victims = [name for name in blobs_of(run_directory) if (run_directory / name).stat().st_size]
    for name in victims:
        overwrite(run_directory / name, b"evil")
    report = verify_store(FileStore(run_directory / "store"), external=False)
    evil = hashlib.sha256(b"evil").hexdigest()
    changed = [fault for fault in report.faults if fault.kind == "changed"]
    assert sorted("store/" + fault.path for fault in changed) == victims
    for fault in changed:
        assert Path(fault.path).name in fault.expected
        assert evil in fault.observed


def test_changed_snapshot_and_data_are_named_and_unreachable_ones_only_listed(
    tmp_path: Path, snapshot: Path, data_file: Path, make_run
) -> None:
    own_snapshot = Path(shutil.copytree(snapshot, tmp_path / "snapshot"))
    own_data = Path(shutil.copy(data_file, tmp_path / "rows.jsonl"))
    (tmp_path / "run").mkdir()
    store = make_run(tmp_path / "run", own_snapshot, own_data)
    assert verify_store(store).ok
    (own_snapshot / "config.json").write_text("[]")
    (own_snapshot / "added.bin").write_text("")
    own_data.write_text("other\n")
    faults = {(fault.kind, fault.path) for fault in verify_store(store).faults}
    assert faults == {
        ("changed", f"{own_snapshot}/config.json"),
        ("extra", f"{own_snapshot}/added.bin"),
        ("changed", str(own_data)),
    }
    assert verify_store(store, external=False).ok
    seal_directory(tmp_path / "run")
    assert {(fault.kind, fault.path) for fault in verify_directory(tmp_path / "run").faults} == faults
    shutil.rmtree(own_snapshot)
    own_data.unlink()
    report = verify_store(store)
    assert report.ok
    assert {line.rpartition(": ")[2] for line in report.unchecked} == {own_snapshot.as_uri() + "/", own_data.as_uri()}

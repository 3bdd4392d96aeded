"""Given a run's directory, when it is sealed, then one index names every file of it, and nothing else passes."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    seal_directory,
    unseal_directory,
    verify_directory,
)
from longstraw_core.spec.errors import SpecError
from tests.artifacts.verification.tampering import files_of, named


def test_index_agrees_with_hashlib_as_an_independent_oracle(run_directory: Path) -> None:
    (index,) = run_directory.glob("complete.sha256-*.json")
    content = index.read_bytes()
    assert index.name == f"complete.sha256-{hashlib.sha256(content).hexdigest()}.json"
    assert {entry["path"]: (entry["digest"], entry["size"]) for entry in json.loads(content)["entries"]} == {
        name: (
            "sha256:" + hashlib.sha256((run_directory / name).read_bytes()).hexdigest(),
            (run_directory / name).stat().st_size,
        )
        for name in files_of(run_directory)
        if name != index.name
    }


def test_sealing_again_replaces_the_index_and_an_unsealed_run_is_incomplete(run_directory: Path) -> None:
    (old,) = run_directory.glob("complete.sha256-*.json")
    (run_directory / "more.txt").write_text("more")
    assert not verify_directory(run_directory).ok
    new = seal_directory(run_directory)
    assert new != old
    assert list(run_directory.glob("complete.*")) == [new]
    assert verify_directory(run_directory).ok
    assert seal_directory(run_directory) == new
    unseal_directory(run_directory)
    report = verify_directory(run_directory)
    assert [fault.kind for fault in report.faults] == ["incomplete"]
    assert "run is incomplete" in report.faults[0].message


def test_two_indexes_or_an_index_under_a_wrong_name_are_refused(run_directory: Path) -> None:
    (index,) = run_directory.glob("complete.sha256-*.json")
    second = run_directory / f"complete.sha256-{'0' * 64}.json"
    shutil.copy(index, second)
    assert [fault.kind for fault in verify_directory(run_directory).faults] == ["incomplete"]
    index.unlink()
    assert named(verify_directory(run_directory), second.name) == ["changed"]


def test_sealing_clears_what_killed_writers_left_and_leaves_the_lock_out(run_directory: Path) -> None:
    (run_directory / "store" / "staging" / "abandoned").write_bytes(b"half")
    (run_directory / ".longstraw-partial-abandoned").write_bytes(b"half")
    (run_directory / "logs" / ".longstraw-partial-tree" / "sub").mkdir(parents=True)
    (run_directory / "logs" / ".longstraw-partial-tree" / "sub" / "file").write_bytes(b"half")
    seal_directory(run_directory)
    (run_directory / ".lock").touch()
    assert os.listdir(run_directory / "logs") == ["train.log"]
    assert verify_directory(run_directory).ok


def test_sealing_refuses_a_symlink_by_name(run_directory: Path) -> None:
    (run_directory / "logs" / "link").symlink_to("train.log")
    with pytest.raises(SpecError, match="logs/link is a symlink"):
        seal_directory(run_directory)


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        verify_directory(tmp_path / "nothing")

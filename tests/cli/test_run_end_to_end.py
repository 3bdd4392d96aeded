"""`longstraw run` for real: killed, resumed, extended, verified, tampered with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.artifacts import verify_directory
from tests.conftest import make_row

COMMAND = [sys.executable, "-m", "longstraw_core.cli"]


@dataclass
class Scene:
    """A specification and the directory its run writes to."""

    spec: Path
    workdir: Path

    def command(self, *extra: str, transactions: int = 1) -> list[str]:
        return [
            *COMMAND,
            "run",
            str(self.spec),
            "--workdir",
            str(self.workdir),
            "--transactions",
            str(transactions),
            *extra,
        ]

    def run(self, *extra: str, transactions: int = 1) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("-o", "json", *extra, transactions=transactions),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def kill_after(self, event: str, stage: str, signal_number: int = signal.SIGKILL) -> int:
        """Start the run, send a signal to the command itself when `stage` reports `event`; return its exit status."""
        with subprocess.Popen(
            self.command("-o", "json"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                seen = json.loads(line)
                if seen["event"] == event and seen.get("stage") == stage:
                    process.send_signal(signal_number)
                    break
            process.stdout.read()
            return process.wait()

    def processes(self) -> list[str]:
        """Command lines of living processes that mention the work directory."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if str(self.workdir) in line:
                    found.append(line)
        return found


def wait_until_gone(scene: Scene) -> None:
    deadline = time.monotonic() + 10
    while scene.processes():
        assert time.monotonic() < deadline, scene.processes()
        time.sleep(0.05)


def events_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, untrained_snapshot: Path) -> Scene:
    directory = tmp_path_factory.mktemp("run")
    (directory / "rows.jsonl").write_text("".join(json.dumps(make_row(n)) + "\n" for n in range(11, 19)))
    fields = {
        "name": "small",
        "model": {"snapshot": os.path.relpath(untrained_snapshot, directory), "family": "qwen3_5_text"},
        "data": {"path": "rows.jsonl"},
        "lora": {"rank": 4},
        "sampling": {"group_size": 2, "max_response_tokens": 4},
        "layout": {"prompt_chunk_tokens": 24, "page_tokens": 16},
    }
    spec = directory / "transaction.yaml"
    spec.write_text(json.dumps(fields))
    return Scene(spec, directory / "work")


@pytest.fixture(scope="module")
def killed(scene: Scene) -> Scene:
    """The run was killed twice: in the middle of a stage, and between two stages."""
    assert scene.kill_after("phase", "export_lora") == -signal.SIGKILL
    wait_until_gone(scene)
    assert scene.kill_after("stage_finished", "sample") == -signal.SIGKILL
    wait_until_gone(scene)
    return scene


@pytest.fixture(scope="module")
def resumed(killed: Scene) -> tuple[Scene, subprocess.CompletedProcess[str]]:
    return killed, killed.run()


@pytest.fixture(scope="module")
def finished(resumed: tuple[Scene, subprocess.CompletedProcess[str]]) -> Scene:
    assert resumed[1].returncode == 0, resumed[1].stderr
    return resumed[0]


@pytest.fixture
def copy(finished: Scene, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(finished.workdir, target)
    return target


def test_a_killed_run_leaves_no_verified_directory(killed: Scene) -> None:
    report = verify_directory(killed.workdir)
    assert any(fault.kind == "incomplete" for fault in report.faults)


def test_the_same_command_finishes_a_killed_run_and_reuses_what_was_finished(
    resumed: tuple[Scene, subprocess.CompletedProcess[str]],
) -> None:
    scene, completed = resumed
    assert completed.returncode == 0, completed.stderr
    events = events_of(completed.stdout)
    done = {event["stage"]: event["reused"] for event in events if event["event"] == "stage_finished"}
    assert done["audit_data"]
    assert done["export_lora"]
    assert done["sample"]
    assert not done["train"]
    assert len(done) == 9
    assert events[-1]["event"] == "summary"
    assert [event["event"] for event in events].count("transaction") == 1
    assert verify_directory(scene.workdir).faults == []
    assert not list((scene.workdir / "scratch").glob("*"))


def test_a_finished_run_is_shown_again_without_writing_anything(finished: Scene) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.workdir.rglob("*") if path.name != ".lock"}
    completed = finished.run()
    assert completed.returncode == 0, completed.stderr
    assert [event["event"] for event in events_of(completed.stdout)] == ["summary"]
    assert {path: path.stat().st_mtime_ns for path in finished.workdir.rglob("*") if path.name != ".lock"} == before


def test_another_specification_is_refused_in_the_same_directory(finished: Scene) -> None:
    completed = finished.run("--set", "objective.gradient=stopgrad")
    assert completed.returncode == 2
    assert "differs in objective.gradient" in completed.stderr
    assert events_of(completed.stdout)[-1]["exit_code"] == 2
    assert verify_directory(finished.workdir).faults == []


def test_every_changed_byte_is_found_by_the_name_of_its_file(copy: Path) -> None:
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != ".lock")
    assert len(files) > 60
    for number, path in enumerate(files):
        original, mode = path.read_bytes(), path.stat().st_mode
        if not original:
            continue
        changed = bytearray(original)
        changed[(number * 7919) % len(changed)] ^= 1 << (number % 8)
        path.chmod(0o644)
        path.write_bytes(bytes(changed))
        name = str(path.relative_to(copy))
        assert any(name in fault.path for fault in verify_directory(copy).faults), name
        path.write_bytes(original)
        path.chmod(mode)
    assert verify_directory(copy).faults == []


@pytest.mark.parametrize(
    "place", ["", "store/", "store/blobs/sha256/", "store/runs/small/0001/train/", "kfp/", "logs/"]
)
def test_an_added_file_is_found_by_its_name(copy: Path, place: str) -> None:
    (copy / place / "stranger").write_text("x")
    assert any(f"{place}stranger" in fault.path for fault in verify_directory(copy).faults)


def test_a_removed_file_and_a_symlink_are_found_by_their_names(copy: Path) -> None:
    for path in sorted(path for path in copy.rglob("*") if path.is_file() and path.name != ".lock"):
        name = str(path.relative_to(copy))
        hidden = copy.parent / "hidden"
        path.rename(hidden)
        missing = verify_directory(copy).faults
        path.symlink_to(hidden)
        symlink = verify_directory(copy).faults
        path.unlink()
        hidden.rename(path)
        if name.startswith("complete."):
            assert any(fault.kind == "incomplete" for fault in missing)
            assert symlink
        else:
            assert any(name in fault.path for fault in missing), name
            assert any(name in fault.path and fault.kind == "symlink" for fault in symlink), name


def test_a_lock_that_is_no_empty_file_is_found(copy: Path) -> None:
    (copy / ".lock").write_text("x")
    assert [fault.path for fault in verify_directory(copy).faults] == [".lock"]
    (copy / ".lock").unlink()
    (copy / ".lock").symlink_to("/etc/hostname")
    assert [(fault.path, fault.kind) for fault in verify_directory(copy).faults] == [(".lock", "symlink")]
    (copy / ".lock").unlink()
    assert verify_directory(copy).faults == []


def test_the_verify_command_says_what_is_wrong_and_exits_with_11(copy: Path) -> None:
    blob = max((copy / "store" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    assert subprocess.run([*COMMAND, "verify", str(copy)], capture_output=True, check=False).returncode == 0
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.seek(blob.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    completed = subprocess.run([*COMMAND, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert completed.returncode == 11
    assert f"store/blobs/sha256/{blob.name}" in completed.stdout
    as_json = subprocess.run([*COMMAND, "verify", str(copy), "-o", "json"], capture_output=True, text=True, check=False)
    assert as_json.returncode == 11
    faults = [event for event in events_of(as_json.stdout) if event["event"] == "fault"]
    assert any(blob.name in fault["path"] for fault in faults)


def test_a_receipt_that_is_not_there_is_no_verified_run(copy: Path) -> None:
    receipt = copy / "store" / "runs" / "small" / "0001" / "validate_run" / "receipt.json"
    uri = receipt.resolve().as_uri()
    assert subprocess.run([*COMMAND, "verify", uri], capture_output=True, check=False).returncode == 0
    receipt.unlink()
    assert subprocess.run([*COMMAND, "verify", uri], capture_output=True, check=False).returncode == 11
    assert subprocess.run([*COMMAND, "verify", str(copy), "--deep"], capture_output=True, check=False).returncode == 2


def test_a_longer_run_continues_from_the_finished_one(finished: Scene, tmp_path: Path) -> None:
    longer = Scene(finished.spec, finished.workdir)
    completed = longer.run(transactions=2)
    assert completed.returncode == 0, completed.stderr
    events = events_of(completed.stdout)
    finished_stages = [(e["transaction"], e["stage"], e["reused"]) for e in events if e["event"] == "stage_finished"]
    assert [reused for transaction, _, reused in finished_stages if transaction == 1] == [True] * 9
    assert [reused for transaction, _, reused in finished_stages if transaction == 2] == [False] * 9
    assert len(events[-1]["rewards"]) == 2
    assert verify_directory(longer.workdir).faults == []

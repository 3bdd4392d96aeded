"""Ranks under torchrun: they exchange, and however one of them ends, all end and its message comes first."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longstraw_core.spec import DataRefused, LongStrawError, Retryable, SpecError, StageFailed
from longstraw_core.training import launch
from longstraw_core.training.launch import run_ranks
from longstraw_core.training.rank_task import RankFailure, RankTask, read_failures, reserve_failures, write_failure

MODULE = "tests.training.rank_functions"


def task(function: str, request: str = "", *, ranks: int = 2, experts: int = 1, timeout: float = 8.0) -> RankTask:
    return RankTask(
        entry=f"{MODULE}:{function}",
        request=request,
        context_parallel=ranks,
        expert_parallel=experts,
        device="cpu",
        host=socket.gethostname(),
        timeout_seconds=timeout,
    )


def processes_naming(directory: Path) -> list[int]:
    """Processes with the directory on their command line: what a launcher left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(directory) in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_ranks_exchange_over_the_groups_of_megatron(tmp_path: Path) -> None:
    results = run_ranks(task("sum_of_ranks", "hello", ranks=2, experts=2), tmp_path / "meet")
    expected = {"request": "hello", "total": 1.0, "gathered": [0, 1], "any": [True, False], "experts": 2}
    assert [json.loads(result or b"null") for result in results] == [expected, expected]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("refuse", DataRefused, "row 7: bad truth"),
        ("crash", StageFailed, "in phase replay: ValueError: an unexpected value"),
        ("kill", StageFailed, "died in phase replay: SIGKILL; the system kills so when memory runs out"),
        ("memory", StageFailed, "out of memory in phase replay"),
        ("disk", Retryable, "in phase replay: writing temporary files below "),
        ("prepare", DataRefused, "what all need is damaged"),
        ("hang", StageFailed, "did not answer the other ranks within 8 s; it has been in phase replay"),
    ],
)
def test_a_rank_that_ends_badly_ends_the_task_with_its_own_message(
    tmp_path: Path, how: str, error: type[LongStrawError], words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(error) as caught:
        run_ranks(task("fail_on_last", how), tmp_path / "meet")
    assert time.monotonic() - started < 60
    assert str(caught.value).startswith(f"rank {0 if how == 'prepare' else 1} of 2 on ")
    assert words in str(caught.value)
    assert processes_naming(tmp_path) == []


def test_a_frozen_rank_is_killed_when_its_heartbeat_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SILENCE_SECONDS", 6.0)
    with pytest.raises(Retryable, match=r"^rank 1 of 2 on .*: gave no sign of life for \d+ s \(frozen\)"):
        run_ranks(task("fail_on_last", "freeze", timeout=50.0), tmp_path / "meet")
    assert processes_naming(tmp_path) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path, stopped: bool) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from longstraw_core.training.launch import run_ranks;"
            "from tests.training.test_launch import task;"
            "run_ranks(task('wait_for_ever', sys.argv[1]), Path(sys.argv[1]) / 'meet')",
            str(tmp_path),
        ]
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(processes_naming(tmp_path)) >= 3
    if stopped:
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGSTOP)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    while processes_naming(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = processes_naming(tmp_path)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


def test_a_layout_that_does_not_fold_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="2 does not divide the 3 context-parallel ranks"):
        run_ranks(task("sum_of_ranks", ranks=3, experts=2), tmp_path / "meet")
    assert not (tmp_path / "meet").exists()


def test_a_report_needs_no_disk_space_that_was_not_taken_before(tmp_path: Path) -> None:
    reserve_failures(tmp_path, range(2))
    reserved = {path.stat().st_ino: path.stat().st_blocks for path in tmp_path.iterdir()}
    failure = RankFailure(
        rank=1, error="Retryable", message="No space left on device", phase="load", lost_another=False, time=1.0
    )
    write_failure(tmp_path, failure)
    assert read_failures(tmp_path) == [failure]
    found = {path.stat().st_ino: path.stat().st_blocks for path in tmp_path.iterdir()}
    assert found.keys() == reserved.keys(), "written in place, not into a new file"
    assert all(found[node] <= blocks for node, blocks in reserved.items())

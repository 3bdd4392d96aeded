"""First process of a worker pod: starts the stage, ends it when the launcher is gone, and says why it failed.

A process of its own, because a rank that hangs in a collective operation or compiles with the interpreter's lock held
cannot watch itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from longstraw_core.artifacts.store import open_store
from longstraw_core.cluster.diagnosis import HEARTBEAT_LOST
from longstraw_core.cluster.heartbeat import (
    LOOK_SECONDS,
    STALE_AFTER_SECONDS,
    STOP_GRACE_SECONDS,
    Watchdog,
)
from longstraw_core.cluster.manifests import TERMINATION_LOG_VARIABLE
from longstraw_core.spec import LongStrawError
from longstraw_core.spec.exit_codes import RETRYABLE, STAGE_FAILED
from longstraw_core.stages.events import EVENT_FILE_VARIABLE
from longstraw_core.stages.failure import report_stage_failure
from longstraw_core.stages.worker import STORE_VARIABLE

HEARTBEAT_VARIABLE = "LONGSTRAW_HEARTBEAT"
WORKER = ("-m", "longstraw_core.stages.worker")
MAX_MESSAGE_BYTES = 4096
"""Kubernetes keeps no more of a termination message."""


def main() -> int:
    """Supervise the worker; return its exit code, or that of a lost heartbeat."""
    try:
        termination_log = Path(os.environ[TERMINATION_LOG_VARIABLE])
        watchdog = Watchdog(open_store(os.environ[STORE_VARIABLE]), os.environ[HEARTBEAT_VARIABLE])
    except KeyError as error:
        print(f"longstraw: {error.args[0]} is not set; this program is started by the launcher's pods", file=sys.stderr)
        return STAGE_FAILED
    except LongStrawError as error:
        return report_stage_failure("node", "unknown", 0, error)
    watchdog.start()
    return supervise([sys.executable, *WORKER], watchdog, termination_log=termination_log)


def supervise(
    command: Sequence[str],
    watchdog: Watchdog,
    *,
    stale_after: float = STALE_AFTER_SECONDS,
    grace: float = STOP_GRACE_SECONDS,
    look: float = LOOK_SECONDS,
    termination_log: Path,
) -> int:
    """Run a command in its own process group until it ends, or until there was no heartbeat for too long.

    Args:
        command: The worker.
        watchdog: Started, and looking at the launcher's heartbeat.
        stale_after: Seconds without a new beat after which the worker is ended.
        grace: Seconds between asking the process group to end and killing it.
        look: Seconds between two looks at the watchdog.
        termination_log: File in which Kubernetes, or who plays it, reads why the container ended.

    Returns:
        The command's exit code; 128 + n when signal n ended it, `HEARTBEAT_LOST` without heartbeat.
    """
    with tempfile.TemporaryDirectory(prefix="longstraw-node-") as directory:
        events = Path(directory) / "events.jsonl"
        worker = subprocess.Popen(
            list(command), start_new_session=True, env={**os.environ, EVENT_FILE_VARIABLE: str(events)}
        )
        told: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            del frame
            told.append(number)
            _signal_group(worker, number)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            lost = False
            while True:
                try:
                    status = worker.wait(timeout=min(look, stale_after / 2))
                    break
                except subprocess.TimeoutExpired:
                    if told:
                        status = _end(worker, grace)
                        break
                    if watchdog.seconds_without_news() > stale_after:
                        lost = True
                        status = _end(worker, grace)
                        break
            _signal_group(worker, signal.SIGKILL)  # what the worker may have left behind in its group
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if lost:
            message = f"no heartbeat of the launcher for {watchdog.seconds_without_news():.0f} s"
            print(f"longstraw: {message}; the worker was ended", file=sys.stderr, flush=True)
            _write_message(termination_log, "Retryable", message, RETRYABLE)
            return HEARTBEAT_LOST
        if status < 0:
            status = 128 - status
        if status != 0:
            failure = _last_failure(events)
            if failure is not None:
                _write_message(termination_log, failure[0], failure[1], status)
        return status


def _signal_group(worker: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, number)


def _end(worker: "subprocess.Popen[bytes]", grace: float) -> int:
    """Ask the worker's process group to end, then kill it."""
    deadline = time.monotonic() + grace
    _signal_group(worker, signal.SIGTERM)
    try:
        return worker.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _signal_group(worker, signal.SIGKILL)
        return worker.wait()


def _last_failure(events: Path) -> tuple[str, str] | None:
    """Error type and message of the last failure that a stage reported."""
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "stage_failed":
            return str(record.get("error")), str(record.get("message"))
    return None


def _write_message(path: Path, error: str, message: str, status: int) -> None:
    room = MAX_MESSAGE_BYTES - 200
    text = message.encode("utf-8")[:room].decode("utf-8", errors="ignore")
    while len(json.dumps(text)) > room:
        text = text[: len(text) // 2]
    try:
        path.write_text(json.dumps({"error": error, "exit_code": status, "message": text}), encoding="utf-8")
    except OSError as problem:
        print(f"longstraw: {path}: {problem.strerror}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

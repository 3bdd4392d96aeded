"""The processes of one session, found in /proc: a server and everything that it spawned, also after it died itself."""

import contextlib
import os
import signal
import time
from pathlib import Path


def session_processes(session: int) -> list[int]:
    """Return the ids of the living processes of a session; those that only wait to be reaped do not count."""
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # proc(5): pid (comm) state ppid pgrp session …; comm may hold spaces and parentheses
            fields = (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in ("Z", "X"):
                found.append(int(directory.name))
    return sorted(found)


def signal_session(session: int, number: signal.Signals) -> None:
    """Send a signal to every living process of a session."""
    for process in session_processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def wait_for_end(session: int, seconds: float) -> bool:
    """Wait until a session has no living process; False when it still has some after `seconds`."""
    deadline = time.monotonic() + seconds
    while session_processes(session):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def kill_session(session: int, seconds: float = 30.0) -> bool:
    """Kill a session's processes until none lives; False when some survive (in uninterruptible system calls)."""
    deadline = time.monotonic() + seconds
    while session_processes(session):
        signal_session(session, signal.SIGKILL)
        if wait_for_end(session, 0.5):
            return True
        if time.monotonic() >= deadline:
            return False
    return True

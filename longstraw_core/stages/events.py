"""Progress events of stages: one JSON line each to the event file, one readable line to standard error."""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

EVENT_FILE_VARIABLE = "LONGSTRAW_EVENT_FILE"


def peak_memory_bytes() -> int:
    """Largest resident set size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def current_memory_bytes() -> int:
    """Resident set size of this process now, in bytes; the peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return peak_memory_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


class EventLog:
    """Writes events of one stage; never raises because of a full disk or a closed terminal."""

    def __init__(
        self, stage: str, run: str, transaction: int, event_file: Path | None = None, *, silent: bool = False
    ) -> None:
        self._silent = silent  # one rank of a stage speaks for all
        self._identity = {"stage": stage, "run": run, "transaction": transaction}
        configured = os.environ.get(EVENT_FILE_VARIABLE)
        self._file = event_file or (Path(configured) if configured else None)
        self._started = time.monotonic()
        self._last_heartbeat = 0.0

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self._silent:
            return
        record = {"event": event, "time": round(time.time(), 3), **self._identity, **fields}
        if self._file is not None:
            line = (json.dumps(record, allow_nan=False, default=str) + "\n").encode("utf-8")
            try:
                descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    os.write(descriptor, line)
                finally:
                    os.close(descriptor)
            except OSError as error:
                print(f"longstraw: progress event not written: {error}", file=sys.stderr)
        detail = " ".join(f"{key}={_short(value)}" for key, value in fields.items() if key != "metrics")
        identity = f"{self._identity['run']}/{self._identity['transaction']} {self._identity['stage']}"
        print(f"longstraw {identity}: {event} {detail}".rstrip(), file=sys.stderr, flush=True)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report work done; at most one line a second, and always the last."""
        now = time.monotonic()
        if done < total and now - self._last_heartbeat < 1.0:
            return
        self._last_heartbeat = now
        self.emit(
            "progress",
            phase=phase,
            done=done,
            total=total,
            seconds=round(now - self._started, 1),
            memory_bytes=current_memory_bytes(),
        )


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = "".join(character if character.isprintable() else "\\" + f"x{ord(character):02x}" for character in text)
    return text if len(text) <= 200 else text[:197] + "..."

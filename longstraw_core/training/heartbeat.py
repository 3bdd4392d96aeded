"""A rank's sign of life: a file that a thread keeps fresh, with the phase that the main thread is in."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from longstraw_core.spec.model import Count, StrictModel

INTERVAL_SECONDS = 1.0


class Beat(StrictModel):
    """What the newest sign of life of a rank says; the time it was given is the file's own."""

    process: Count
    phase: str
    phase_seconds: float
    """How long the main thread has been in `phase` without telling of progress."""


def heartbeat_path(directory: Path, rank: int) -> Path:
    """Where a rank leaves its sign of life."""
    return directory / f"heartbeat-{rank:05d}.json"


def read_beat(directory: Path, rank: int) -> tuple[Beat, float] | None:
    """Return a rank's newest beat and its age in seconds, or None before the first one."""
    path = heartbeat_path(directory, rank)
    try:
        return Beat.model_validate_json(path.read_bytes()), time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


class Heartbeat:
    """Beats from a thread of its own until the process ends, or ends the process when its launcher is gone.

    Args:
        directory: shared with the launcher on this host.
        rank: this process's rank.
        on_orphaned: called when the launcher died; the default ends the process at once, whatever it is doing.
    """

    def __init__(self, directory: Path, rank: int, *, on_orphaned: Callable[[], None] = lambda: os._exit(1)) -> None:
        self._path = heartbeat_path(directory, rank)
        self._launcher = os.getppid()
        self._on_orphaned = on_orphaned
        self._phase, self._since = "start", time.monotonic()
        self._writing = threading.Lock()
        self._beat()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @property
    def phase(self) -> str:
        """What the main thread said last."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Note what the main thread does now."""
        changed = phase != self._phase
        self._phase, self._since = phase, time.monotonic()
        if changed:
            self._beat()

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL_SECONDS)
            if os.getppid() != self._launcher:
                self._on_orphaned()
                return
            self._beat()

    def _beat(self) -> None:
        beat = Beat(process=os.getpid(), phase=self._phase, phase_seconds=time.monotonic() - self._since)
        temporary = self._path.with_suffix(".new")
        with self._writing:
            temporary.write_text(json.dumps(beat.model_dump()), encoding="utf-8")
            temporary.replace(self._path)

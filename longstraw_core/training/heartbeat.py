"""A rank's sign of life: a file that a thread keeps fresh, with the phase that the main thread is in."""

import contextlib
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


def read_beat(directory: Path, rank: int) -> tuple[Beat, int] | None:
    """Return a rank's newest beat and when it was given, or None before the first one.

    The time tells one beat from the next and nothing else: clocks are set, and machines pause.
    """
    path = heartbeat_path(directory, rank)
    try:
        return Beat.model_validate_json(path.read_bytes()), path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


class Silence:
    """For how long ranks have given no new sign of life, counted in the looks of whoever watches.

    Args:
        longest_step: seconds that count at most between two looks: when the watcher itself stood still, so did all.
    """

    def __init__(self, longest_step: float) -> None:
        self._longest_step = longest_step
        self._newest: dict[int, tuple[int, float]] = {}
        self._looked: dict[int, float] = {}

    def seconds(self, rank: int, given: int, now: float) -> float:
        """Return the rank's silence at a look.

        Args:
            rank: which one.
            given: what `read_beat` says of its newest beat's time.
            now: a monotonic clock.
        """
        step = min(now - self._looked.get(rank, now), self._longest_step)
        self._looked[rank] = now
        before, silent = self._newest.get(rank, (None, 0.0))
        silent = silent + step if given == before else 0.0
        self._newest[rank] = (given, silent)
        return silent


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
            try:
                temporary.write_text(json.dumps(beat.model_dump()), encoding="utf-8")
                temporary.replace(self._path)
            except OSError:  # no space: the rank lives on until it needs some itself, and says so
                with contextlib.suppress(OSError):
                    os.utime(self._path)

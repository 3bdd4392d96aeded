"""A launcher's sign of life in the artifact store, and the workers' watch for it.

Beats are numbered create-only objects, so nobody's clock is compared with anybody else's: a worker counts, on its own
monotonic clock, the time since a number appeared that it had not seen. Worst case from the launcher's death to the end
of a worker: one beat that came just before, `STALE_AFTER`, one look, and the grace that the processes are given:
60 + 5 + 15 = 80 of the 90 seconds that are promised.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from longstraw_core.artifacts.store import AlreadyPublished, Store
from longstraw_core.spec import LongStrawError, canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON

BEAT_SECONDS = 15.0
STALE_AFTER_SECONDS = 60.0
LOOK_SECONDS = 5.0
STOP_GRACE_SECONDS = 15.0
PROMISED_SECONDS = 90.0

_KEPT_BEATS = 3


class Heart:
    """Beats for one attempt in a thread of its own; notices when a later attempt of the stage beats too."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        attempt: int,
        *,
        interval: float = BEAT_SECONDS,
        complain: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._attempt = attempt
        self._interval = interval
        self._complain = complain
        self._next = 1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.superseded = threading.Event()
        """Set when a later attempt of the same stage has taken over."""

    def start(self) -> None:
        """Store the first beat, then beat in the background.

        Raises:
            Retryable: the store cannot be written.
        """
        self._next = latest_beat(self._store, self._prefix) + 1
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; workers that still run end by themselves."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._interval)

    def beat(self) -> None:
        """Store one beat and remove all but the latest few."""
        content = canonical_json({"attempt": self._attempt})
        while True:
            name = beat_name(self._prefix, self._next)
            try:
                self._store.create_object(name, content, MEDIA_TYPE_JSON)
                break
            except AlreadyPublished as error:
                other = parse_canonical_json(self._store.get_bytes(error.published), name=name)
                if isinstance(other, dict) and other.get("attempt", 0) > self._attempt:
                    self.superseded.set()
                    return
                self._next += 1  # a launcher that was superseded and has not noticed yet
        if self._next > _KEPT_BEATS:
            self._store.delete_object(beat_name(self._prefix, self._next - _KEPT_BEATS))
        self._next += 1

    def _run(self) -> None:
        while not self._stopped.wait(self._interval) and not self.superseded.is_set():
            try:
                self.beat()
            except LongStrawError as error:
                self._complain(f"heartbeat not written, workers end without it: {error}")


class Watchdog:
    """Looks for new beats in a thread; `seconds_without_news` never waits for the store, however slow that is."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        interval: float = LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._interval = interval
        self._clock = clock
        self._latest = 0
        self._news = clock()
        self._looked = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Look in the background for as long as this process lives."""
        self._thread.start()

    def look(self) -> None:
        """Look once. The beats that the first look finds may be of a launcher that is long gone: they are no news.

        Raises:
            LongStrawError: the store cannot be read.
        """
        latest = latest_beat(self._store, self._prefix)
        if latest > self._latest and self._looked:
            self._news = self._clock()
        self._latest = max(latest, self._latest)
        self._looked = True

    def seconds_without_news(self) -> float:
        """Time since a beat appeared that had not been there before, or since this watchdog was made."""
        return self._clock() - self._news

    def _run(self) -> None:
        while True:
            with suppress(LongStrawError, OSError):  # no news, and the count goes on
                self.look()
            time.sleep(self._interval)


def beat_name(prefix: str, number: int) -> str:
    """Object name of a beat; `prefix` ends in `/`."""
    return f"{prefix}{number:08d}.json"


def latest_beat(store: Store, prefix: str) -> int:
    """Number of the latest beat, 0 when there is none."""
    names = store.list_names(prefix)
    return max((int(name.removeprefix(prefix).removesuffix(".json")) for name in names), default=0)


def remove_beats(store: Store, prefix: str) -> None:
    """Remove what is left of the beats of a stage none of whose workers can be alive."""
    for name in store.list_names(prefix):
        store.delete_object(name)

"""The log of rank 0 while it runs, and the tails of pods that failed, as printable lines."""

import threading
import time
from collections.abc import Callable

from longstraw_core.cluster.api import ClusterApi, Conflict, Missing, Unreachable
from longstraw_core.cluster.manifests import CONTAINER
from longstraw_core.spec import SpecError

TAIL_LINES = 40
_MARGIN_SECONDS = 5


class LogFollower:
    """Prints one pod's log line by line in a thread; a broken connection continues after the last printed line."""

    def __init__(self, api: ClusterApi, pod: str, prefix: str, print_line: Callable[[str], None]) -> None:
        self._api = api
        self._pod = pod
        self._prefix = prefix
        self._print = print_line
        self._last = ""
        self._last_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def start(self) -> None:
        """Follow in the background."""
        self._thread.start()

    def finish(self, *, within: float) -> None:
        """Wait for the rest of the log of a container that ended, then print no more."""
        self._thread.join(timeout=within)
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            since = None if not self._last else int(time.monotonic() - self._last_at) + _MARGIN_SECONDS
            try:
                for line in self._api.follow_log(self._pod, CONTAINER, since):
                    if self._stopped.is_set():
                        return
                    stamp, _, text = line.partition(" ")
                    if stamp <= self._last:
                        continue  # printed before the connection broke
                    self._last, self._last_at = stamp, time.monotonic()
                    self._print(f"{self._prefix} | {printable_line(text)}")
                return
            except Unreachable:
                self._stopped.wait(self._api.patience.pause_seconds)
            except (Missing, Conflict, SpecError):
                return  # the log is gone with its pod


def print_tails(api: ClusterApi, pods: tuple[str, ...], print_line: Callable[[str], None]) -> None:
    """Print the end of each pod's log; what cannot be read is left out."""
    for pod in pods:
        text = api.log_tail(pod, CONTAINER, TAIL_LINES)
        lines = text.splitlines()
        print_line(f"{pod}: {f'last {len(lines)} lines' if lines else 'no log'}")
        for line in lines:
            print_line(f"{pod} | {printable_line(line)}")


def printable_line(text: str) -> str:
    """A log line without control characters, of at most 2,000 characters."""
    shown = "".join(character if character.isprintable() or character == "\t" else "?" for character in text)
    return shown if len(shown) <= 2000 else shown[:1997] + "..."

"""Keeps the state of one Job and its pods current through lists and watches, and says so through one queue."""

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from longstraw_core.cluster.api import ClusterApi, Expired, Unreachable, WatchedResource
from longstraw_core.spec import LongStrawError

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """All selected objects of a resource as they are now."""

    resource: WatchedResource
    objects: tuple[JsonObject, ...]


@dataclass(frozen=True, slots=True)
class Trouble:
    """The server did not answer; the watch goes on trying."""

    resource: WatchedResource
    error: LongStrawError


Notice = Seen | Trouble


@dataclass
class ResourceWatch:
    """Lists, watches from there, continues dropped watches where they stood, and lists again when that is too old."""

    api: ClusterApi
    resource: WatchedResource
    selector: str
    notices: "queue.Queue[Notice]"
    _objects: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Watch in a daemon thread until `stop`."""
        threading.Thread(target=self._run, name=f"watch-{self.resource}", daemon=True).start()

    def stop(self) -> None:
        """Say nothing more."""
        self._stopped.set()

    def _run(self) -> None:
        version: str | None = None
        pause = self.api.patience.pause_seconds
        while not self._stopped.is_set():
            try:
                if version is None:
                    version = self._list()
                version = self._watch(version)
                pause = self.api.patience.pause_seconds
            except Expired:
                version = None
                self._stopped.wait(self.api.patience.pause_seconds / 4)
            # whatever it is: a thread that ended without a word would leave the launcher waiting for ever
            except Exception as error:
                trouble = error if isinstance(error, LongStrawError) else Unreachable(_unexpected(self.resource, error))
                self._say(Trouble(self.resource, trouble))
                # what was missed meanwhile is in the list, whether or not the version is still known
                version = None
                self._stopped.wait(max(pause, trouble.wait_seconds if isinstance(trouble, Unreachable) else 0.0))
                pause = min(2 * pause, 15.0)

    def _list(self) -> str:
        objects, version = self.api.list_all(self.resource, self.selector)
        self._objects = {item["metadata"]["uid"]: item for item in objects}
        self._say_state()
        return version

    def _watch(self, version: str) -> str:
        """Follow one watch to its end; return the version to continue from."""
        events = self.api.watch(self.resource, self.selector, version)
        try:
            for event in events:
                if self._stopped.is_set():
                    break
                item = event["object"]
                version = str(item["metadata"]["resourceVersion"])
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED":
                    self._objects.pop(item["metadata"]["uid"], None)
                else:
                    self._objects[item["metadata"]["uid"]] = item
                self._say_state()
        except Unreachable:
            # ordinary; it is trouble only when the server does not answer the next request either
            self._stopped.wait(self.api.patience.pause_seconds / 4)
        return version

    def _say_state(self) -> None:
        self._say(Seen(self.resource, tuple(self._objects.values())))

    def _say(self, notice: Notice) -> None:
        if not self._stopped.is_set():
            self.notices.put(notice)


def _unexpected(resource: WatchedResource, error: Exception) -> str:
    return f"watching {resource}: unexpected answer: {type(error).__name__}: {' '.join(str(error).split())}"

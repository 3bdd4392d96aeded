"""The kubelet that tests play, through the API alone: the fake and the real server cannot tell the difference."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import urllib3

JsonObject = dict[str, Any]
GPU = "nvidia.com/gpu"
INDEX = "batch.kubernetes.io/job-completion-index"
MERGE = {"Content-Type": "application/merge-patch+json"}


@dataclass
class LogStore:
    """Log lines by pod name; a log ends when its container does."""

    _lines: dict[str, list[str]] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def write(self, pod: str, text: str) -> None:
        with self._changed:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
            self._lines.setdefault(pod, []).append(f"{stamp} {text}")
            self._changed.notify_all()

    def end(self, pod: str) -> None:
        with self._changed:
            self._ended.add(pod)
            self._changed.notify_all()

    def lines(
        self, pod: str, *, follow: bool, timestamps: bool, tail: int | None, stopping: threading.Event
    ) -> Iterator[str]:
        with self._changed:
            position = 0 if tail is None else max(0, len(self._lines.get(pod, [])) - tail)
        while not stopping.is_set():
            with self._changed:
                fresh = self._lines.get(pod, [])[position:]
                ended = pod in self._ended
                if not fresh and not ended and follow:
                    self._changed.wait(timeout=0.2)
            position += len(fresh)
            for line in fresh:
                yield line if timestamps else line.partition(" ")[2]
            if not fresh and (ended or not follow):
                return


@dataclass
class Kubelet:
    """Moves pods of one namespace through their lives. `end_terminating` must be called, or run in the background."""

    url: str
    headers: dict[str, str]
    logs: LogStore
    namespace: str
    pool: urllib3.PoolManager
    _stop: threading.Event = field(default_factory=threading.Event)

    def request(self, method: str, path: str, body: JsonObject | None = None, **headers: str) -> JsonObject:
        answer = self.pool.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={**self.headers, "Content-Type": "application/json", **headers},
            timeout=10.0,
            retries=False,
        )
        value = json.loads(answer.data or b"{}")
        if answer.status >= 400:
            raise LookupError(f"{method} {path}: {answer.status} {value.get('message')}")
        return value

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def add_nodes(self, count: int, *, gpus: int = 8, first: int = 0) -> None:
        for number in range(first, first + count):
            name = f"{self.namespace}-node-{number}"
            amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "2Ti", GPU: str(gpus)}
            self.request(
                "POST",
                "/api/v1/nodes",
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
                    "status": {
                        "capacity": amounts,
                        "allocatable": amounts,
                        "conditions": [
                            {
                                "type": "Ready",
                                "status": "True",
                                "reason": "Played",
                                "message": "",
                                "lastHeartbeatTime": _now(),
                                "lastTransitionTime": _now(),
                            }
                        ],
                    },
                },
            )

    def create_pod(self, name: str, image: str) -> JsonObject:
        """A pod that no Job owns, such as the launcher's."""
        return self.request(
            "POST",
            self._pods,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"containers": [{"name": "main", "image": image}]},
            },
        )

    def pods(self, job: str) -> list[JsonObject]:
        found = self.request("GET", f"{self._pods}?labelSelector=longstraw.io/job%3D{job}")["items"]
        return sorted(found, key=lambda pod: int(pod["metadata"]["annotations"][INDEX]))

    def all_pods(self) -> list[JsonObject]:
        return self.request("GET", self._pods)["items"]

    def wait_for_pods(self, job: str, count: int, *, bound: bool = True) -> list[JsonObject]:
        def ready() -> list[JsonObject]:
            found = [pod for pod in self.pods(job) if not pod["metadata"].get("deletionTimestamp")]
            placed = [pod for pod in found if pod["spec"].get("nodeName") or not bound]
            return placed if len(placed) == count else []

        return eventually(ready, f"{count} pods of {job}")

    def start(self, pod: JsonObject, image_id: str) -> None:
        """The container runs, in this image."""
        self._status(pod, "Running", {"running": {"startedAt": _now()}}, image_id=image_id, ready=True)

    def succeed(self, pod: JsonObject, image_id: str) -> None:
        self.logs.end(pod["metadata"]["name"])
        self._status(pod, "Succeeded", {"terminated": _ended(0, "Completed", "")}, image_id=image_id)

    def crash(self, pod: JsonObject, image_id: str, code: int, message: str = "", reason: str = "Error") -> None:
        self.logs.end(pod["metadata"]["name"])
        self._status(pod, "Failed", {"terminated": _ended(code, reason, message)}, image_id=image_id)

    def cannot_pull(self, pod: JsonObject, reason: str = "ImagePullBackOff") -> None:
        message = "Back-off pulling image: manifest unknown"
        self._status(pod, "Pending", {"waiting": {"reason": reason, "message": message}}, image_id="")

    def evict(self, pod: JsonObject, image_id: str) -> None:
        """The node is short of memory and ends the pod."""
        self.logs.end(pod["metadata"]["name"])
        self._status(
            pod,
            "Failed",
            {"terminated": _ended(137, "Error", "")},
            image_id=image_id,
            reason="Evicted",
            message="The node was low on resource: memory.",
            condition={
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "TerminationByKubelet",
                "message": "The node was low on resource: memory.",
                "lastTransitionTime": _now(),
            },
        )

    def set_phase(self, name: str, phase: str) -> None:
        self.request("PATCH", f"{self._pods}/{name}/status", {"status": {"phase": phase}}, **MERGE)

    def delete_pod(self, name: str) -> None:
        self.request("DELETE", f"{self._pods}/{name}", {"gracePeriodSeconds": 0})

    def end_terminating(self) -> None:
        """End the containers of every pod that is being deleted, as a kubelet does within the grace period."""
        for pod in self.all_pods():
            if pod["metadata"].get("deletionTimestamp"):
                self.logs.end(pod["metadata"]["name"])
                try:
                    if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                        self._status(pod, "Failed", {"terminated": _ended(143, "Error", "")}, image_id="")
                    self.delete_pod(pod["metadata"]["name"])
                except LookupError:
                    continue  # somebody else was quicker

    def run_in_background(self) -> None:
        def loop() -> None:
            while not self._stop.wait(0.1):
                try:
                    self.end_terminating()
                except (LookupError, urllib3.exceptions.HTTPError, OSError):
                    continue

        threading.Thread(target=loop, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _status(
        self,
        pod: JsonObject,
        phase: str,
        state: JsonObject,
        *,
        image_id: str,
        ready: bool = False,
        reason: str = "",
        message: str = "",
        condition: JsonObject | None = None,
    ) -> None:
        container = pod["spec"]["containers"][0]
        kept = [
            item for item in pod["status"].get("conditions") or [] if condition and item["type"] != condition["type"]
        ]
        status: JsonObject = {
            "phase": phase,
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": image_id,
                    "ready": ready,
                    "restartCount": 0,
                    "state": state,
                    "lastState": {},
                }
            ],
        }
        if reason:
            status |= {"reason": reason, "message": message}
        if condition is not None:
            status["conditions"] = [*kept, condition]
        self.request("PATCH", f"{self._pods}/{pod['metadata']['name']}/status", {"status": status}, **MERGE)


def _ended(code: int, reason: str, message: str) -> JsonObject:
    ended = {"exitCode": code, "reason": reason, "startedAt": _now(), "finishedAt": _now()}
    return ended | ({"message": message} if message else {})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def eventually(condition: Callable[[], Any], what: str, *, seconds: float = 90.0) -> Any:
    """Return the first true value of a condition; generous, because it only bounds failure."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.05)

"""Pods played by processes of this machine, which run what the Job's template says."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cluster.conftest import IMAGE, IMAGE_ID
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import INDEX
from tests.servers.ports import free_port

LOOPBACK = "127.0.0.1"
TERMINATION_LOG = "termination-log"
"""In a pod's scratch directory; in a real one the template's `terminationMessagePath`."""


class PodProcesses:
    """Runs the command of every pod of a Job as a process here, all at once, and tells the server how it ends.

    What a cluster's name service does is played too: the name of pod 0 is the loopback address, and its rendezvous
    port a free one.
    """

    def __init__(self, cluster: Cluster, directory: Path, *, image_variable: str = IMAGE) -> None:
        self._cluster = cluster
        self._directory = directory
        self._image_variable = image_variable
        self._port = free_port()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        """By the pod's index."""
        self.lines: dict[int, list[str]] = {}
        """What the pods wrote, by index."""

    def play(self, job: str, count: int) -> threading.Thread:
        """Wait for the pods and run them, in the background."""

        def run() -> None:
            for pod in self._cluster.kubelet.wait_for_pods(job, count):
                threading.Thread(target=self._run, args=(pod,), daemon=True).start()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Ask what still runs to end, as the kubelet does with pods of a deleted Job."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=60)

    def _environment(self, pod: dict[str, Any], scratch: Path) -> dict[str, str]:
        index = pod["metadata"]["annotations"][INDEX]
        environment = {item["name"]: item.get("value", index) for item in pod["spec"]["containers"][0]["env"]}
        leader = environment["LONGSTRAW_NODE_LEADER"]
        assert environment["LONGSTRAW_RENDEZVOUS"].rpartition(":")[0] == leader
        return {
            **os.environ,
            **environment,
            **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(scratch)),
            "LONGSTRAW_IMAGE": self._image_variable,
            "LONGSTRAW_NODE_LEADER": LOOPBACK,
            "LONGSTRAW_RENDEZVOUS": f"{LOOPBACK}:{self._port}",
            "LONGSTRAW_TERMINATION_LOG": str(scratch / TERMINATION_LOG),
        }

    def _run(self, pod: dict[str, Any]) -> None:
        name, index = pod["metadata"]["name"], int(pod["metadata"]["annotations"][INDEX])
        container = pod["spec"]["containers"][0]
        command = container["command"]
        told = [item.get("value") for item in container["env"] if item["name"] == "LONGSTRAW_TERMINATION_LOG"]
        assert told == [container["terminationMessagePath"]]
        assert command[0] == "python3"
        scratch = self._directory / name
        scratch.mkdir()
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            env=self._environment(pod, scratch),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes[index] = process
        lines = self.lines.setdefault(index, [])
        self._cluster.kubelet.start(pod, IMAGE_ID)
        for line in process.stdout or ():
            lines.append(line.rstrip())
            self._cluster.kubelet.logs.write(name, line.rstrip())
        status = process.wait()
        with suppress(LookupError):  # the launcher has deleted the pod meanwhile
            if status == 0:
                self._cluster.kubelet.succeed(pod, IMAGE_ID)
            else:
                log = scratch / TERMINATION_LOG
                message = log.read_text() if log.exists() else ""
                self._cluster.kubelet.crash(pod, IMAGE_ID, status if status > 0 else 128 - status, message)

"""The logs of a run's stage pods, finished or going on, from the Kubernetes API."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from longstraw_core.kubeflow.kubernetes_access import (
    TIMEOUT_SECONDS,
    KubernetesAccess,
    NotAllowed,
    kubernetes_errors,
)
from longstraw_core.kubeflow.run_state import checked_run_id
from longstraw_core.kubeflow.watch import PATIENCE_SECONDS
from longstraw_core.spec.errors import Retryable, SpecError
from longstraw_core.spec.receipts import StageName

RUN_LABEL = "pipeline/runid"
"""Set by KFP on every pod of a run."""

STAGE_LABEL = "longstraw.io/stage"
"""Set by our pipeline on every stage's pod."""

CONTAINER = "main"
"""Argo's name of the container that does the work."""

ShowLine = Callable[["StagePod", str], None]


@dataclass(frozen=True)
class StagePod:
    """One attempt of one stage."""

    name: str
    stage: str
    created: datetime
    started: bool
    """Whether the container runs or ran, so that it has a log."""
    finished: bool


def stage_pods(access: KubernetesAccess, run_id: str, stage: StageName | None = None) -> list[StagePod]:
    """Return the pods of a run's stages that Kubernetes still has, the oldest first."""
    from kubernetes import client

    selector = f"{RUN_LABEL}={checked_run_id(run_id)},{STAGE_LABEL}" + (f"={stage}" if stage else "")
    with kubernetes_errors(access.server, f"listing pods in {access.namespace}"):
        answer: Any = client.CoreV1Api(access.client).list_namespaced_pod(
            access.namespace, label_selector=selector, _request_timeout=TIMEOUT_SECONDS
        )
    pods = [_stage_pod(pod) for pod in answer.items]
    return sorted(pods, key=lambda pod: (pod.created, pod.name))


def _stage_pod(pod: Any) -> StagePod:
    statuses = [status for status in pod.status.container_statuses or () if status.name == CONTAINER]
    state = statuses[0].state if statuses else None
    return StagePod(
        name=pod.metadata.name,
        stage=pod.metadata.labels[STAGE_LABEL],
        created=pod.metadata.creation_timestamp,
        started=state is not None and (state.running is not None or state.terminated is not None),
        finished=pod.status.phase in ("Succeeded", "Failed"),
    )


def read_log(access: KubernetesAccess, pod: StagePod, *, follow: bool, tail: int | None) -> Iterator[str]:
    """Yield the lines of a pod's log; with `follow` until its container ends."""
    from kubernetes import client

    with kubernetes_errors(access.server, f"reading the log of {pod.name}"):
        response: Any = client.CoreV1Api(access.client).read_namespaced_pod_log(
            pod.name,
            access.namespace,
            container=CONTAINER,
            follow=follow,
            _preload_content=False,
            _request_timeout=(TIMEOUT_SECONDS[0], None) if follow else TIMEOUT_SECONDS,
            **({} if tail is None else {"tail_lines": tail}),
        )
        rest = b""
        try:
            for block in response.stream(amt=None, decode_content=True):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", errors="replace")
            if rest:
                yield rest.decode("utf-8", errors="replace")
        finally:
            response.release_conn()


def follow_logs(
    access: KubernetesAccess,
    run_id: str,
    stage: StageName | None,
    show: ShowLine,
    *,
    run_is_finished: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    poll_seconds: float,
) -> int:
    """Show every line of every stage's pod as it comes, until the run has ended; return how many pods were seen.

    A pod's log that breaks off is taken up again at its next line by number, because Kubernetes keeps the whole log.
    A pod that is deleted meanwhile has shown what it could.

    Raises:
        NotAllowed: pods may be listed but not their logs read.
        Retryable: one of the servers was away for too long; the run goes on.
    """
    readers: dict[str, threading.Thread] = {}
    shown: dict[str, int] = {}
    lock = threading.Lock()
    complete: set[str] = set()
    seen: set[str] = set()
    refused: list[NotAllowed] = []

    def read(pod: StagePod) -> None:
        done = shown.setdefault(pod.name, 0)
        try:
            for number, line in enumerate(read_log(access, pod, follow=True, tail=None)):
                if number >= done:
                    with lock:
                        show(pod, line)
                    shown[pod.name] = number + 1
        except NotAllowed as error:
            refused.append(error)
            return
        except (Retryable, SpecError):
            return  # the connection broke, or the pod has just gone: the next look decides
        if pod.finished:
            complete.add(pod.name)

    last_answer = clock()
    while True:
        try:
            ended = run_is_finished()
            pods = stage_pods(access, run_id, stage)
        except Retryable as error:
            if clock() - last_answer > PATIENCE_SECONDS:
                raise Retryable(f"{error}; no answer for {clock() - last_answer:.0f} s; the run goes on") from error
            sleep(poll_seconds)
            continue
        if refused:
            raise refused[0]
        last_answer = clock()
        seen.update(pod.name for pod in pods)
        for pod in pods:
            reader = readers.get(pod.name)
            if pod.started and pod.name not in complete and (reader is None or not reader.is_alive()):
                readers[pod.name] = threading.Thread(target=read, args=(pod,), daemon=True)
                readers[pod.name].start()
        if ended and all(pod.name in complete or not pod.started for pod in pods):
            return len(seen)
        sleep(poll_seconds)

"""What the state of a Job and its pods means: pure functions from Kubernetes objects to a verdict."""

import json
import re
from dataclasses import dataclass
from typing import Any

from longstraw_core.cluster.manifests import CONTAINER
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.spec import IntegrityError, LongStrawError, Retryable, SpecError, StageFailed
from longstraw_core.spec.exit_codes import EXIT_CODES, error_from_name

JsonObject = dict[str, Any]

INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
HEARTBEAT_LOST = 76
"""Exit status of a worker that ended because its launcher gave no sign of life."""

_PULL_FAULTS = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_PULL_FAULTS_FOR_EVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_CONFIGURATION_FAULTS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}$")
_ERROR_BY_STATUS = {status: kind for kind, status in EXIT_CODES.items()}


@dataclass(frozen=True, slots=True)
class Completed:
    """Every pod succeeded, in the image of the plan."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage cannot complete any more."""

    error: LongStrawError
    pods: tuple[str, ...] = ()
    """Pods whose logs say more, the cause first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not there yet; whether that is normal is a matter of how long."""

    reason: str
    """`pods`, `nodes`, `image`, `configuration`, `running`, `evidence` or `cause`."""
    message: str


Verdict = Completed | Failed | Waiting


def judge(plan: PlacementPlan, job: JsonObject | None, pods: tuple[JsonObject, ...]) -> Verdict:
    """Say what a Job (None: it is gone) and its pods mean for the stage."""
    for pod in pods:
        wrong = _wrong_image(plan, pod)
        if wrong is not None:
            return Failed(wrong)
    if job is None:
        return Failed(Retryable(f"Job {plan.name} was deleted while it ran, not by its launcher; run again"))
    conditions = {
        item["type"]: item for item in job.get("status", {}).get("conditions") or [] if item["status"] == "True"
    }
    if "Complete" in conditions:
        return _completed(plan, pods)
    failed = [pod for pod in pods if _phase(pod) == "Failed" or _disrupted(pod) is not None]
    ended = conditions.get("FailureTarget") or conditions.get("Failed")
    # a pod that is being deleted did not fail by itself; why it is deleted, the Job says a moment later
    by_themselves = [
        pod for pod in failed if _disrupted(pod) is not None or not pod["metadata"].get("deletionTimestamp")
    ]
    if ended or by_themselves:
        return _failed(plan, ended, by_themselves or failed)
    return _waiting(plan, job, pods)


def pod_index(pod: JsonObject) -> int:
    """Completion index of a pod; -1 when it has none."""
    text = str((pod["metadata"].get("annotations") or {}).get(INDEX_ANNOTATION, ""))
    return int(text) if text.isdecimal() else -1


def container_started(pod: JsonObject) -> bool:
    """Whether the worker's container runs or has run, so that it has a log."""
    state = _worker(pod).get("state") or {}
    return "running" in state or "terminated" in state


def _worker(pod: JsonObject) -> JsonObject:
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name") == CONTAINER:
            return status
    return {}


def _phase(pod: JsonObject) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _shown(pod: JsonObject) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    return f"pod {pod['metadata']['name']} (rank of node {pod_index(pod)}{f', on {node}' if node else ''})"


def _wrong_image(plan: PlacementPlan, pod: JsonObject) -> IntegrityError | None:
    observed = str(_worker(pod).get("imageID") or "")
    if not observed:
        return None
    found = _DIGEST.search(observed)
    if found is not None and found.group() == plan.image_digest:
        return None
    return IntegrityError(
        f"{_shown(pod)} runs image {_clean(observed)}, the plan says {plan.image}; its results are not used"
    )


def _completed(plan: PlacementPlan, pods: tuple[JsonObject, ...]) -> Verdict:
    checked = {pod_index(pod) for pod in pods if _phase(pod) == "Succeeded" and _worker(pod).get("imageID")}
    missing = sorted(set(range(plan.placement.nodes)) - checked)
    if missing:
        return Waiting("evidence", f"Job {plan.name} is complete; the image of pods {missing} has not been seen")
    return Completed()


def _failed(plan: PlacementPlan, ended: JsonObject | None, failed: list[JsonObject]) -> Failed | Waiting:
    reason, message = str((ended or {}).get("reason") or ""), _clean((ended or {}).get("message"))
    if reason == "DeadlineExceeded":
        return Failed(
            StageFailed(
                f"Job {plan.name} was stopped after {plan.placement.deadline_seconds} s; "
                "raise timeout_minutes of the stage or give it more nodes"
            )
        )
    if not failed:
        # Jobs and pods are watched apart: which pod failed, and why, may arrive a moment later
        return Waiting("cause", f"Job {plan.name} failed: {reason}: {message}")
    causes = sorted(failed, key=_blame)
    return Failed(_pod_error(causes[0]), tuple(pod["metadata"]["name"] for pod in causes))


def _blame(pod: JsonObject) -> tuple[bool, str, bool, int]:
    """The cause first: a pod that was taken away, then who ended first, then who says why."""
    ended = (_worker(pod).get("state") or {}).get("terminated") or {}
    return (_disrupted(pod) is None, str(ended.get("finishedAt") or "9"), _reported(pod) is None, pod_index(pod))


def _pod_error(pod: JsonObject) -> LongStrawError:
    disrupted = _disrupted(pod)
    if disrupted is not None:
        return Retryable(f"{_shown(pod)} was taken away: {disrupted}; run again")
    if pod["metadata"].get("deletionTimestamp"):
        return Retryable(f"{_shown(pod)} was deleted while it ran, not by its launcher; run again")
    ended = (_worker(pod).get("state") or {}).get("terminated") or {}
    reported = _reported(pod)
    if reported is not None:
        return reported
    status, reason = ended.get("exitCode"), str(ended.get("reason") or "")
    if reason == "OOMKilled":
        return StageFailed(f"{_shown(pod)} was killed for its memory; raise memory of the stage")
    if status == HEARTBEAT_LOST:
        return Retryable(f"{_shown(pod)} ended because the launcher's heartbeat was missing; run again")
    if isinstance(status, int) and status in _ERROR_BY_STATUS:
        return _ERROR_BY_STATUS[status](f"{_shown(pod)} ended with status {status}; its log says why")
    if status is None:
        status_of_pod = pod.get("status") or {}
        return StageFailed(
            f"{_shown(pod)} failed: {status_of_pod.get('reason')}: {_clean(status_of_pod.get('message'))}"
        )
    return StageFailed(f"{_shown(pod)} ended with status {status}; its log says why")


def _reported(pod: JsonObject) -> LongStrawError | None:
    """The error that the worker wrote as its termination message."""
    message = ((_worker(pod).get("state") or {}).get("terminated") or {}).get("message")
    try:
        record = json.loads(message or "")
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("error"), str):
        return None
    return error_from_name(record["error"], f"{_shown(pod)}: {_clean(record.get('message'))}")


def _disrupted(pod: JsonObject) -> str | None:
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"{condition.get('reason')}: {_clean(condition.get('message'))}"
    if status.get("reason") in ("Evicted", "Preempting", "NodeLost", "Shutdown", "Terminated"):
        return f"{status['reason']}: {_clean(status.get('message'))}"
    return None


def _waiting(plan: PlacementPlan, job: JsonObject, pods: tuple[JsonObject, ...]) -> Verdict:
    if job["spec"].get("suspend"):
        return Waiting("nodes", f"queue {plan.placement.queue} has not admitted Job {plan.name}")
    for pod in pods:
        waiting = (_worker(pod).get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), _clean(waiting.get("message"))
        if reason in _PULL_FAULTS_FOR_EVER:
            return Failed(SpecError(f"{_shown(pod)}: image {plan.image}: {reason}: {message}"))
        if reason in _PULL_FAULTS:
            return Waiting("image", f"{_shown(pod)} cannot pull {plan.image}: {reason}: {message}")
        if reason in _CONFIGURATION_FAULTS:
            return Waiting("configuration", f"{_shown(pod)} cannot start: {reason}: {message}")
    missing = plan.placement.nodes - len(pods)
    if missing > 0:
        return Waiting("pods", f"{missing} of {plan.placement.nodes} pods of Job {plan.name} were not created")
    for pod in pods:
        for condition in (pod.get("status") or {}).get("conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return Waiting("nodes", f"{_shown(pod)} has no node: {_clean(condition.get('message'))}")
    without_node = [pod for pod in pods if not (pod.get("spec") or {}).get("nodeName")]
    if without_node:
        return Waiting("nodes", f"{len(without_node)} of {plan.placement.nodes} pods have no node yet")
    running = sum(container_started(pod) for pod in pods)
    return Waiting("running", f"{running} of {plan.placement.nodes} pods have started")


def _clean(text: object) -> str:
    """One printable line."""
    flat = " ".join(str(text or "no message").split())
    shown = "".join(character if character.isprintable() else "?" for character in flat)
    return shown if len(shown) <= 400 else shown[:397] + "..."

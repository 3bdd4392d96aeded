"""The fake's controllers: Jobs, scheduling, garbage collection and time to live, as kube-controller-manager does them.

Each looks at the whole state and says whether it changed anything. The kubelet is not here: tests play it.
"""

import copy
import secrets
import string
import uuid
from datetime import UTC, datetime
from typing import Any

from tests.servers.kubernetes_api.storage import PLURALS, Storage
from tests.servers.kubernetes_api.validation import amount

JsonObject = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
HOSTNAME = "kubernetes.io/hostname"


def owned_pods(storage: Storage, job: JsonObject) -> list[JsonObject]:
    uid = job["metadata"]["uid"]
    return [
        pod
        for pod in storage.all("pods", job["metadata"]["namespace"])
        if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", []))
    ]


def job_controller(storage: Storage) -> bool:
    acted = [_reconcile_job(storage, job) for job in storage.all("jobs")]
    return any(acted)


def _reconcile_job(storage: Storage, job: JsonObject) -> bool:
    if job["metadata"].get("deletionTimestamp"):
        return False
    before = copy.deepcopy(job["status"])
    acted = False
    status, spec = job["status"], job["spec"]
    pods = owned_pods(storage, job)
    if not _condition(status, "Complete") and not _condition(status, "Failed"):
        if spec["suspend"]:
            status.pop("startTime", None)
            _set_condition(storage, status, "Suspended", "JobSuspended", "Job suspended")
        else:
            status["conditions"] = [item for item in status.get("conditions", []) if item["type"] != "Suspended"]
            status.setdefault("startTime", storage.timestamp())
            acted = _advance(storage, job, pods)
            pods = owned_pods(storage, job)
    phases = [pod["status"].get("phase") for pod in pods]
    status["active"] = sum(phase in ("Pending", "Running") for phase in phases)
    status["succeeded"] = phases.count("Succeeded")
    status["failed"] = max(phases.count("Failed"), status.get("failed", 0))
    status["terminating"] = sum(bool(pod["metadata"].get("deletionTimestamp")) for pod in pods)
    if status != before:
        storage.change("jobs", job)
        return True
    return acted


def _advance(storage: Storage, job: JsonObject, pods: list[JsonObject]) -> bool:
    status, spec = job["status"], job["spec"]
    active = [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
    if not _condition(status, "FailureTarget"):
        failure = _failure(storage, job, pods)
        if failure is not None:
            _set_condition(storage, status, "FailureTarget", *failure)
    target = _condition(status, "FailureTarget")
    if target is not None:
        acted = False
        for pod in active:
            if not pod["metadata"].get("deletionTimestamp"):
                storage._delete_pod(pod, {})
                acted = True
        if not active:
            _set_condition(storage, status, "Failed", target["reason"], target["message"])
        return acted
    succeeded = {_index(pod) for pod in pods if pod["status"].get("phase") == "Succeeded"}
    if len(succeeded) == spec["completions"]:
        _set_condition(storage, status, "SuccessCriteriaMet", "CompletionsReached", "Reached expected number of pods")
        _set_condition(storage, status, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        status["completionTime"] = storage.timestamp()
        return False
    acted = False
    taken = succeeded | {_index(pod) for pod in active}
    for index in range(spec["completions"]):
        if index not in taken and len(active) < spec["parallelism"]:
            if not _create_pod(storage, job, index):
                break
            acted = True
    return acted


def _failure(storage: Storage, job: JsonObject, pods: list[JsonObject]) -> tuple[str, str] | None:
    spec, status = job["spec"], job["status"]
    started = datetime.strptime(status["startTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and storage.now() - started >= deadline:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
    # a pod that was deleted counts as failed too, once it is gone
    for pod in failed:
        for number, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
            if rule["action"] == "FailJob" and _matches(rule, pod):
                return "PodFailurePolicy", f"Pod {pod['metadata']['name']} matching FailJob rule at index {number}"
    if len(failed) > spec.get("backoffLimit", 6):
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None


def _matches(rule: JsonObject, pod: JsonObject) -> bool:
    for condition in rule.get("onPodConditions") or []:
        for observed in pod["status"].get("conditions") or []:
            if (observed["type"], observed["status"]) == (condition["type"], condition["status"]):
                return True
    codes = rule.get("onExitCodes")
    if codes:
        for container in pod["status"].get("containerStatuses") or []:
            ended = (container.get("state") or {}).get("terminated")
            if ended and codes.get("containerName") in (None, container["name"]) and ended["exitCode"] != 0:
                return (ended["exitCode"] in codes["values"]) == (codes["operator"] == "In")
    return False


def _create_pod(storage: Storage, job: JsonObject, index: int) -> bool:
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    template = copy.deepcopy(job["spec"]["template"])
    pod_name = f"{name}-{index}-{''.join(secrets.choice(string.ascii_lowercase) for _ in range(5))}"
    refused = _quota_problem(storage, namespace, template["spec"], pod_name)
    if refused is not None:
        _warn(storage, job, "FailedCreate", f"Error creating: {refused}")
        return False
    metadata = template.get("metadata", {})
    metadata |= {
        "name": pod_name,
        "namespace": namespace,
        "uid": str(uuid.uuid4()),
        "creationTimestamp": storage.timestamp(),
        "annotations": {**metadata.get("annotations", {}), INDEX: str(index)},
        "labels": {**metadata.get("labels", {}), INDEX: str(index)},
        "ownerReferences": [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": name,
                "uid": job["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    template["spec"]["hostname"] = f"{name}-{index}"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": template["spec"],
        "status": {"phase": "Pending"},
    }
    storage.objects["pods", namespace, pod_name] = pod
    storage._record("pods", "ADDED", pod)
    return True


def _quota_problem(storage: Storage, namespace: str, spec: JsonObject, pod_name: str) -> str | None:
    used = len([pod for pod in storage.all("pods", namespace) if pod["status"].get("phase") in ("Pending", "Running")])
    for quota in storage.all("resourcequotas", namespace):
        limit = quota["spec"].get("hard", {}).get("pods")
        if limit is not None and used + 1 > amount(str(limit)):
            return (
                f'pods "{pod_name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, requested: pods=1, '
                f"used: pods={used}, limited: pods={limit}"
            )
    return None


def _warn(storage: Storage, job: JsonObject, reason: str, message: str) -> None:
    namespace, name = job["metadata"]["namespace"], f"{job['metadata']['name']}.{reason.lower()}"
    if ("events", namespace, name) in storage.objects:
        return
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace, "uid": str(uuid.uuid4())},
        "involvedObject": {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": storage.timestamp(),
    }
    storage.objects["events", namespace, name] = event
    storage._record("events", "ADDED", event)


def scheduler(storage: Storage) -> bool:
    acted = False
    for pod in storage.all("pods"):
        if (
            pod["spec"].get("nodeName")
            or pod["status"].get("phase") != "Pending"
            or pod["metadata"].get("deletionTimestamp")
        ):
            continue
        node = next((node for node in storage.all("nodes") if _fits(storage, pod, node)), None)
        if node is not None:
            pod["spec"]["nodeName"] = node["metadata"]["name"]
            _set_condition(storage, pod["status"], "PodScheduled", "Scheduled", "")
            storage.change("pods", pod)
            acted = True
        elif _condition(pod["status"], "PodScheduled", "False") is None:
            nodes = len(storage.all("nodes"))
            message = f"0/{nodes} nodes are available: preemption is not helpful for scheduling."
            _set_condition(storage, pod["status"], "PodScheduled", "Unschedulable", message, value="False")
            storage.change("pods", pod)
            acted = True
    return acted


def _fits(storage: Storage, pod: JsonObject, node: JsonObject) -> bool:
    labels = node["metadata"].get("labels", {})
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    here = [
        other
        for other in storage.all("pods")
        if other["spec"].get("nodeName") == node["metadata"]["name"]
        and other["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    spread = ((pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution", []
    )
    for term in spread:
        wanted = (term.get("labelSelector") or {}).get("matchLabels", {})
        for other in here:
            if wanted.items() <= other["metadata"].get("labels", {}).items():
                return False
    # this fake has no claims, and a pod does not get a node before its claims exist and are bound
    if any("persistentVolumeClaim" in volume for volume in pod["spec"].get("volumes") or []):
        return False
    for name, value in node["status"].get("allocatable", {}).items():
        if name != "pods" and sum(_request(item, name) for item in (*here, pod)) > amount(str(value)):
            return False
    return all(
        name in node["status"].get("allocatable", {})
        for container in pod["spec"]["containers"]
        for name in (container.get("resources") or {}).get("limits", {})
        if "/" in name
    )


def _request(pod: JsonObject, name: str) -> float:
    """What a pod asks for: its requests, where there are none its limits."""
    total = 0.0
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        total += amount(str(asked.get(name, "0")))
    return total


def garbage_collector(storage: Storage) -> bool:
    present = {item["metadata"]["uid"]: item for item in storage.objects.values()}
    acted = False
    for (plural, _, _), item in sorted(storage.objects.items()):
        owners = item["metadata"].get("ownerReferences", [])
        living = [
            owner
            for owner in owners
            if owner["uid"] in present
            and present[owner["uid"]]["metadata"]["name"] == owner["name"]
            and (PLURALS[owner["kind"]], item["metadata"].get("namespace", ""), owner["name"]) in storage.objects
        ]
        waited_for = [owner for owner in living if _foreground(present[owner["uid"]])]
        if owners and (not living or len(waited_for) == len(living)) and not item["metadata"].get("deletionTimestamp"):
            if plural == "pods":
                storage._delete_pod(item, {})
            else:
                storage.remove(plural, item)
            acted = True
    for (plural, _, _), item in sorted(storage.objects.items()):
        if _foreground(item):
            uid = item["metadata"]["uid"]
            blocking = [
                other
                for other in storage.objects.values()
                for owner in other["metadata"].get("ownerReferences", [])
                if owner["uid"] == uid and owner.get("blockOwnerDeletion")
            ]
            if not blocking:
                storage.remove(plural, item)
                acted = True
    return acted


def _foreground(item: JsonObject) -> bool:
    return "foregroundDeletion" in item["metadata"].get("finalizers", [])


def time_to_live(storage: Storage) -> bool:
    acted = False
    for job in storage.all("jobs"):
        ended = _condition(job["status"], "Complete") or _condition(job["status"], "Failed")
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ended is None or ttl is None or job["metadata"].get("deletionTimestamp"):
            continue
        at = datetime.strptime(ended["lastTransitionTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
        if storage.now() - at >= ttl:
            storage.remove("jobs", job)
            acted = True
    return acted


CONTROLLERS = (job_controller, scheduler, garbage_collector, time_to_live)


def _index(pod: JsonObject) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _condition(status: JsonObject, kind: str, value: str = "True") -> JsonObject | None:
    return next((c for c in status.get("conditions") or [] if c["type"] == kind and c["status"] == value), None)


def _set_condition(
    storage: Storage, target: JsonObject, kind: str, reason: str, message: str, *, value: str = "True"
) -> None:
    if _condition(target, kind, value) is not None:
        return
    others = [item for item in target.get("conditions") or [] if item["type"] != kind]
    target["conditions"] = [
        *others,
        {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastProbeTime": storage.timestamp(),
            "lastTransitionTime": storage.timestamp(),
        },
    ]

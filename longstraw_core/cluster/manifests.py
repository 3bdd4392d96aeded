"""A placement plan as Kubernetes objects: one headless Service and one Indexed Job, as plain JSON values."""

from dataclasses import dataclass
from typing import Any

from longstraw_core.cluster.names import (
    INTENT_ANNOTATION,
    JOB_LABEL,
    PLAN_ANNOTATION,
    QUEUE_LABEL,
    RUN_LABEL,
    STAGE_LABEL,
    TRANSACTION_LABEL,
    label_value,
)
from longstraw_core.cluster.placement import RENDEZVOUS_PORT, TTL_SECONDS, PlacementPlan
from longstraw_core.cluster.task_config import SCRATCH, SHARED_MEMORY
from longstraw_core.spec import canonical_json
from longstraw_core.spec.receipts import StageName

CONTAINER = "worker"
NODE_COMMAND = ("python3", "-m", "longstraw_core.stages.node")
TERMINATION_GRACE_SECONDS = 30
TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes reads why a container ended."""
TERMINATION_LOG_VARIABLE = "LONGSTRAW_TERMINATION_LOG"

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Owner:
    """A pod that other objects depend on: Kubernetes deletes them with it."""

    name: str
    uid: str

    def reference(self) -> JsonObject:
        """Owner reference; it neither controls nor blocks, so it needs no right on the pod's finalizers."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": self.name,
            "uid": self.uid,
            "controller": False,
            "blockOwnerDeletion": False,
        }


def service_manifest(plan: PlacementPlan, *, intent: str, owner: Owner | None) -> JsonObject:
    """The headless Service that gives every pod of the Job a name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan, intent, owner),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: plan.name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT, "protocol": "TCP"}],
        },
    }


def job_manifest(plan: PlacementPlan, *, intent: str, owner: Owner | None) -> JsonObject:
    """The Indexed Job: all pods or failure, never a pod replaced on its own, and an end whatever happens."""
    placement = plan.placement
    metadata = _metadata(plan, intent, owner)
    spec: JsonObject = {
        "completionMode": "Indexed",
        "completions": placement.nodes,
        "parallelism": placement.nodes,
        "backoffLimit": 0,
        "activeDeadlineSeconds": placement.deadline_seconds,
        "ttlSecondsAfterFinished": TTL_SECONDS,
        "podReplacementPolicy": "Failed",
        # one lost pod stops the collective operations of all: the Job fails at once and says which pod it was
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": [0]},
                },
            ]
        },
        "template": _pod_template(plan),
    }
    if placement.queue is not None:
        metadata["labels"][QUEUE_LABEL] = placement.queue
        spec["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def stage_labels(run: str, transaction: int, stage: StageName, name: str) -> dict[str, str]:
    """Labels of everything that a stage's launcher creates under `name`."""
    return {
        "app.kubernetes.io/name": "longstraw",
        "app.kubernetes.io/managed-by": "longstraw",
        RUN_LABEL: label_value(run),
        TRANSACTION_LABEL: str(transaction),
        STAGE_LABEL: stage,
        JOB_LABEL: name,
    }


def _labels(plan: PlacementPlan) -> dict[str, str]:
    return stage_labels(plan.run, plan.transaction, plan.stage, plan.name)


def _metadata(plan: PlacementPlan, intent: str, owner: Owner | None) -> JsonObject:
    metadata: JsonObject = {
        "name": plan.name,
        "namespace": plan.namespace,
        "labels": _labels(plan),
        "annotations": {PLAN_ANNOTATION: plan.digest, INTENT_ANNOTATION: intent},
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner.reference()]
    return metadata


def _pod_template(plan: PlacementPlan) -> JsonObject:
    placement, pod = plan.placement, plan.pod
    user = {
        name: value
        for name, value in (("runAsUser", placement.run_as_user), ("runAsGroup", placement.run_as_group))
        if value is not None
    }
    spec: JsonObject = {
        "restartPolicy": "Never",
        "subdomain": plan.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            **user,
            **({} if placement.run_as_group is None else {"fsGroup": placement.run_as_group}),
        },
        "affinity": _affinity(plan),
        "containers": [_container(plan)],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": placement.shared_memory}},
            {"name": "scratch", "emptyDir": {"sizeLimit": placement.scratch}},
            *pod.volumes,
        ],
    }
    if pod.node_selector:
        spec["nodeSelector"] = dict(pod.node_selector)
    if pod.tolerations:
        spec["tolerations"] = list(pod.tolerations)
    if placement.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in placement.pull_secrets]
    return {
        # a sidecar would outlive the worker and keep the Job from completing
        "metadata": {"labels": _labels(plan), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": spec,
    }


def _affinity(plan: PlacementPlan) -> JsonObject:
    """The task's own affinity, and one pod of this Job per node."""
    affinity = dict(plan.pod.affinity)
    apart = dict(affinity.get("podAntiAffinity") or {})
    required = list(apart.get("requiredDuringSchedulingIgnoredDuringExecution") or [])
    required.append({"labelSelector": {"matchLabels": {JOB_LABEL: plan.name}}, "topologyKey": "kubernetes.io/hostname"})
    apart["requiredDuringSchedulingIgnoredDuringExecution"] = required
    return {**affinity, "podAntiAffinity": apart}


def _container(plan: PlacementPlan) -> JsonObject:
    capabilities: JsonObject = {"drop": ["ALL"]}
    if plan.placement.rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "name": CONTAINER,
        "image": plan.image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(NODE_COMMAND),
        "env": _environment(plan),
        "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"}],
        "resources": plan.pod.resources,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": SHARED_MEMORY},
            {"name": "scratch", "mountPath": SCRATCH},
            *plan.pod.volume_mounts,
        ],
    }


def _environment(plan: PlacementPlan) -> list[JsonObject]:
    """The task's own variables, default directories, and what tells a process its place among the others."""
    rendezvous = (plan.pod_host(0), str(RENDEZVOUS_PORT))
    directories = {
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "XDG_CACHE_HOME": f"{SCRATCH}/.cache",
        "PYTHONUNBUFFERED": "1",
    }
    given = {item["name"] for item in plan.pod.env}
    place = {
        "MASTER_ADDR": rendezvous[0],
        "MASTER_PORT": rendezvous[1],
        "NNODES": str(plan.placement.nodes),
        "NPROC_PER_NODE": str(plan.placement.processes_per_node),
        "LONGSTRAW_NODES": str(plan.placement.nodes),
        "LONGSTRAW_NODE_LEADER": rendezvous[0],
        "LONGSTRAW_RENDEZVOUS": ":".join(rendezvous),
        "LONGSTRAW_STORE": plan.store,
        "LONGSTRAW_REQUEST": canonical_json(plan.request).decode("utf-8"),
        "LONGSTRAW_HEARTBEAT": f"{plan.prefix}heartbeat/",
        "LONGSTRAW_IMAGE": plan.image,
        TERMINATION_LOG_VARIABLE: TERMINATION_LOG,
    }
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [
        *plan.pod.env,
        *({"name": name, "value": value} for name, value in directories.items() if name not in given),
        *({"name": name, "value": value} for name, value in place.items()),
        *({"name": name, "valueFrom": index} for name in ("NODE_RANK", "LONGSTRAW_NODE_RANK")),
    ]

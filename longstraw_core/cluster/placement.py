"""The placement plan: which pods a multi-pod stage gets, as one frozen value computed from its arguments alone."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from longstraw_core.cluster.names import object_name
from longstraw_core.cluster.task_config import PodSettings, check_environment
from longstraw_core.spec import Descriptor, SpecError, canonical_json, sha256_digest
from longstraw_core.spec.cluster import MULTI_POD_STAGES
from longstraw_core.spec.model import PositiveCount, Sha256, StrictModel
from longstraw_core.spec.receipts import StageName

RENDEZVOUS_PORT = 29500
TTL_SECONDS = 3600
"""How long Kubernetes keeps a finished Job that nobody deleted."""
MAX_NODES = 1024

_PINNED = re.compile(r".+@(sha256:[0-9a-f]{64})")


class Placement(StrictModel):
    """What the specification says about a multi-pod stage."""

    nodes: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
    processes_per_node: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    deadline_seconds: PositiveCount = 24 * 3600
    """Longest life of the Job from its start, scheduling included."""
    scheduling_seconds: PositiveCount = 1800
    """Longest wait until every pod has a node; with a queue, from admission on."""
    queue: str | None = None
    """Kueue queue; the Job is created suspended and Kueue starts all of its pods or none."""
    rdma: bool = False
    """Add the capability IPC_LOCK, which registered memory of InfiniBand and RoCE needs."""
    shared_memory: str = "16Gi"
    scratch: str = "64Gi"
    run_as_user: PositiveCount | None = 1000
    run_as_group: PositiveCount | None = 1000
    pull_secrets: tuple[str, ...] = ()


class PlacementPlan(StrictModel):
    """Everything that decides what the pods of a stage are; equal plans give equal pods."""

    kind: str = "longstraw.placement/1"
    namespace: str
    name: str
    """Name of the Job and of the headless Service."""
    store: str
    run: str
    transaction: PositiveCount
    stage: StageName
    spec_digest: Sha256
    image: str
    request: Descriptor
    """The object from which the workers read what to do."""
    placement: Placement
    pod: PodSettings

    @property
    def digest(self) -> str:
        """`sha256:…` of the plan's canonical JSON."""
        return sha256_digest(canonical_json(self))

    @property
    def image_digest(self) -> str:
        """`sha256:…` that every pod's `imageID` must end in."""
        return self.image.rpartition("@")[2]

    @property
    def prefix(self) -> str:
        """Where the store keeps the journal and the heartbeat of this stage."""
        return stage_prefix(self.run, self.transaction, self.stage)

    @property
    def world_size(self) -> int:
        """Processes of the stage, over all nodes."""
        return self.placement.nodes * self.placement.processes_per_node

    def pod_host(self, index: int) -> str:
        """Name under which a pod is found by the others of its Service."""
        return f"{self.name}-{index}.{self.name}"

    def rows(self) -> list[tuple[str, str]]:
        """The plan for people: name and value, in reading order."""
        limits = self.pod.resources.get("limits", {})
        return [
            ("job and service", f"{self.namespace}/{self.name}"),
            ("image", self.image),
            ("pods", f"{self.placement.nodes}, one per node"),
            ("processes", f"{self.world_size} ({self.placement.processes_per_node} per pod)"),
            ("rendezvous", f"{self.pod_host(0)}:{RENDEZVOUS_PORT}"),
            (
                "resources per pod",
                ", ".join(f"{name} {value}" for name, value in sorted(limits.items())) or "no limits",
            ),
            ("node selector", ", ".join(f"{name}={value}" for name, value in sorted(self.pod.node_selector.items()))),
            ("queue", self.placement.queue or "none: pods start as nodes come free"),
            (
                "deadline",
                f"{self.placement.deadline_seconds} s, scheduling within {self.placement.scheduling_seconds} s",
            ),
            ("plan", self.digest),
        ]


def stage_prefix(run: str, transaction: int, stage: StageName) -> str:
    """Object prefix of one stage's journal: `cluster/<run>/<transaction, 4 digits>/<stage>/`."""
    return f"cluster/{run}/{transaction:04d}/{stage}/"


def make_plan(
    *,
    namespace: str,
    store: str,
    run: str,
    transaction: int,
    stage: StageName,
    spec_digest: str,
    image: str,
    request: Descriptor,
    placement: Placement,
    pod: PodSettings,
) -> PlacementPlan:
    """Return the plan of one multi-pod stage; no clock, no environment, no network.

    Raises:
        SpecError: the stage runs in one pod only, the image is not pinned by digest, the store cannot be reached from
            other nodes, or the pod's environment is too large.
    """
    if stage not in MULTI_POD_STAGES:
        raise SpecError(f"{stage} runs in one pod; stages of several pods are {', '.join(MULTI_POD_STAGES)}")
    if _PINNED.fullmatch(image) is None:
        raise SpecError(f"image {image!r} of {stage} is not repository@sha256:<64 hex digits>; take it from the lock")
    if store.startswith("file://") and placement.nodes > 1 and not _mounted(store, pod.volume_mounts):
        raise SpecError(
            f"storage.uri {store} is a directory of one machine, and {stage} has {placement.nodes} pods; "
            "use s3://bucket/prefix, or mount the volume it lies on"
        )
    check_environment(pod)
    return PlacementPlan(
        namespace=namespace,
        name=object_name(store=store, run=run, transaction=transaction, stage=stage, spec_digest=spec_digest),
        store=store,
        run=run,
        transaction=transaction,
        stage=stage,
        spec_digest=spec_digest,
        image=image,
        request=request,
        placement=placement,
        pod=pod,
    )


def _mounted(store: str, mounts: tuple[Mapping[str, Any], ...]) -> bool:
    path = store.removeprefix("file://").rstrip("/") + "/"
    return any(path.startswith(str(mount["mountPath"]).rstrip("/") + "/") for mount in mounts)

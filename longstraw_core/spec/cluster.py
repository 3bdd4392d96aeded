"""Section `cluster` of the specification: what a stage's pod gets. Values marked * are only defaults of the
pipeline's run-time parameters, the others are compiled in, because KFP takes them at no other time."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from longstraw_core.spec.model import Count, FiniteFloat, PositiveCount, StrictModel
from longstraw_core.spec.receipts import StageName

ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""Name of a Kubernetes object (DNS subdomain)."""
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        max_length=317,
    ),
]
MountPath = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$", max_length=256)]

_VOLUME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<suffix>m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
MULTI_POD_STAGES: tuple[StageName, ...] = ("sample", "capture_prefix", "old_logprobs", "train")
"""Stages that can run in several pods."""
SCRATCH = "/scratch"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
CERTIFICATES = "/etc/longstraw-certificates"
RESERVED_VOLUMES = (
    *("scratch", "shared-memory", "kfp-launcher"),
    *("gcs-scratch", "s3-scratch", "minio-scratch", "dot-local-scratch", "dot-cache-scratch", "dot-config-scratch"),
)
"""Volumes of this project's pods and of KFP's launcher; KFP names the volume of a claim or config map after it."""
RESERVED_MOUNTS = (SCRATCH, SHARED_MEMORY, CERTIFICATES, "/tmp", "/s3", "/minio", "/gcs", "/kfp-launcher")  # noqa: S108
"""Taken by this project, and by KFP's launcher for the artifacts of each kind of store."""


def _quantity(text: str) -> str:
    match = _QUANTITY.fullmatch(text)
    if match is None or float(match["number"]) == 0.0:
        raise ValueError("must be a Kubernetes quantity above zero, for instance 2, 500m, 16Gi")
    return text


def _volume_name(text: str) -> str:
    if _VOLUME.fullmatch(text) is None:
        raise ValueError(f"{text!r} must have at most 63 of a-z 0-9 -, because the pod's volume has its name")
    if text in RESERVED_VOLUMES:
        raise ValueError(f"{text!r} is the name of a volume that every pod has; rename it")
    return text


Quantity = Annotated[str, Field(max_length=32), AfterValidator(_quantity)]


class PodResources(StrictModel):
    """What one pod of a role gets."""

    cpu: Quantity = "1"
    """CPU request *; there is no CPU limit, which would only slow a pod down on a free node."""
    memory: Quantity = "4Gi"
    """Memory request and limit *."""
    accelerators: Annotated[int, Field(strict=True, ge=0, le=16)] = 0
    """Accelerators per pod *; of kind `cluster.accelerator`."""
    shared_memory: Quantity = "1Gi"
    """Size of /dev/shm; counts as memory of the pod."""
    scratch: Quantity = "16Gi"
    """Size of /scratch, where HOME, caches and temporary files are."""
    timeout_minutes: PositiveCount = 60
    """Longest time of one attempt of one stage."""


class ControlResources(PodResources):
    """Pods without accelerators: audit, rewards, manifests, validation."""

    accelerators: Annotated[int, Field(strict=True, ge=0, le=0)] = 0


class TrainerResources(PodResources):
    """Pods that hold the model to capture, replay and train."""

    cpu: Quantity = "8"
    memory: Quantity = "64Gi"
    accelerators: Annotated[int, Field(strict=True, ge=0, le=16)] = 1
    shared_memory: Quantity = "16Gi"
    scratch: Quantity = "256Gi"
    timeout_minutes: PositiveCount = 24 * 60


class SamplerResources(TrainerResources):
    """Pods that hold the model to sample."""

    timeout_minutes: PositiveCount = 12 * 60


class StageResources(StrictModel):
    """What one stage gets instead of what its role gets; None leaves it."""

    cpu: Quantity | None = None
    memory: Quantity | None = None
    accelerators: Annotated[int, Field(strict=True, ge=0, le=16)] | None = None
    shared_memory: Quantity | None = None
    scratch: Quantity | None = None
    timeout_minutes: PositiveCount | None = None
    nodes: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Pods of the stage, each on a node of its own; above one the task only launches and watches them."""
    rdma: bool = False
    """With several nodes: the capability IPC_LOCK, for InfiniBand and RoCE."""
    scheduling_minutes: PositiveCount = 30
    """With several nodes: longest wait until all of them are free, with a queue from admission on."""


class Retries(StrictModel):
    """How often a failed stage is tried again; finished work is verified and reused, so a retry is cheap."""

    count: Annotated[int, Field(strict=True, ge=0, le=10)] = 2
    backoff_seconds: PositiveCount = 30
    factor: Annotated[FiniteFloat, Field(ge=1.0)] = 2.0
    max_seconds: PositiveCount = 600


class Toleration(StrictModel):
    """A Kubernetes toleration."""

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    seconds: Count | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Toleration":
        if self.key is None and self.operator != "Exists":
            raise ValueError("a toleration without key needs operator: Exists")
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value")
        if self.seconds is not None and self.effect != "NoExecute":
            raise ValueError("seconds belongs to effect: NoExecute")
        return self

    def to_kubernetes(self) -> dict[str, Any]:
        """Return the object as the Kubernetes API spells it."""
        fields = {
            "key": self.key,
            "operator": self.operator,
            "value": self.value,
            "effect": self.effect,
            "tolerationSeconds": self.seconds,
        }
        return {name: value for name, value in fields.items() if value is not None}


class ClaimMount(StrictModel):
    """A persistent volume claim that every stage mounts, for instance the one with model and rows."""

    claim: Annotated[ObjectName, AfterValidator(_volume_name)]
    mount_path: MountPath

    @model_validator(mode="after")
    def _own_place(self) -> "ClaimMount":
        parts = self.mount_path.split("/")
        if "." in parts or ".." in parts:
            raise ValueError("mount_path must be a plain absolute path")
        for reserved in RESERVED_MOUNTS:
            if self.mount_path == reserved or self.mount_path.startswith(reserved + "/"):
                raise ValueError(f"mount_path {self.mount_path} is taken: {reserved} is the pod's own")
        return self


class StoreAuthority(StrictModel):
    """Where the authority is that signed the certificate of the store's server."""

    config_map: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"), AfterValidator(_volume_name)]
    """Config map of the pods' namespace; a DNS label, because the pod's volume has its name."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$")] = "ca.crt"
    """Its key with the certificates in PEM."""

    @property
    def path(self) -> str:
        """File in a pod, for `AWS_CA_BUNDLE`."""
        return f"{CERTIFICATES}/{self.key}"


class ClusterSpec(StrictModel):
    """How stages become pods; without influence on what they compute."""

    queue: LabelValue | None = None
    """Kueue queue, as the label `kueue.x-k8s.io/queue-name` of every pod."""
    accelerator: LabelKey = "nvidia.com/gpu"
    """Resource name of the accelerator *."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels that nodes of trainer and sampler stages must have *."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that trainer and sampler stages tolerate *."""
    store_secret: ObjectName = "longstraw-store"  # noqa: S105
    """Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY *; may be missing where pods have a role."""
    store_config: ObjectName = "longstraw-store"
    """Config map with AWS_ENDPOINT_URL_S3, AWS_REGION, LONGSTRAW_S3_PATH_STYLE *; may be missing."""
    store_authority: StoreAuthority | None = None
    """Authority of a store with a certificate of its own; None: those that the image trusts."""
    pull_secret: ObjectName = "longstraw-registry"  # noqa: S105
    """Image pull secret *; may be missing where the registry asks for none."""
    volumes: tuple[ClaimMount, ...] = ()
    run_as_user: PositiveCount | None = 1000
    """User of the containers; None where the cluster assigns one (OpenShift). Never root."""
    run_as_group: PositiveCount | None = 1000
    retries: Retries = Retries()
    control: ControlResources = ControlResources()
    trainer: TrainerResources = TrainerResources()
    sampler: SamplerResources = SamplerResources()
    stages: dict[StageName, StageResources] = Field(default_factory=dict[StageName, StageResources])
    """Stages that get other resources than their role."""

    @model_validator(mode="after")
    def _nodes_where_they_can_be(self) -> "ClusterSpec":
        for stage, resources in self.stages.items():
            if resources.nodes > 1 and stage not in MULTI_POD_STAGES:
                raise ValueError(f"stages.{stage}: nodes: only {', '.join(MULTI_POD_STAGES)} can have several")
        return self

    @model_validator(mode="after")
    def _mounts_apart(self) -> "ClusterSpec":
        for name in ("claim", "mount_path"):
            values = [getattr(volume, name) for volume in self.volumes]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"volumes: {name} {twice[0]} is there twice")
        if self.store_authority and self.store_authority.config_map in {volume.claim for volume in self.volumes}:
            raise ValueError(
                f"store_authority: config_map {self.store_authority.config_map} is a claim's name too; rename one"
            )
        return self

"""What KFP and kfp-kubernetes are told about the pod of one stage; the stage's work is not changed by any of it."""

from dataclasses import dataclass
from typing import Any

from kfp import kubernetes

from longstraw_core.cluster.names import QUEUE_LABEL, STAGE_LABEL
from longstraw_core.cluster.placement import Placement
from longstraw_core.spec.cluster import CERTIFICATES, SCRATCH, SHARED_MEMORY, ClusterSpec, PodResources
from longstraw_core.spec.images import ROLES, ImageRole
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.source import IMAGE_VARIABLE, WORKER_IMAGE_VARIABLE

LAUNCHER_MARGIN_SECONDS = 900
SECRET_KEYS = {name: name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
CONFIG_KEYS = {name: name for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "LONGSTRAW_S3_PATH_STYLE")}
POD_DIRECTORIES = {
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "XDG_CACHE_HOME": f"{SCRATCH}/.cache",
    "HF_HOME": f"{SCRATCH}/.cache/huggingface",
    "MPLCONFIGDIR": f"{SCRATCH}/.cache/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/.cache/torchinductor",
    "TRITON_CACHE_DIR": f"{SCRATCH}/.cache/triton",
}
"""Everything a library writes besides outputs: the image's root is not writable for a user that is not root."""


@dataclass(frozen=True)
class RuntimeSettings:
    """The pipeline's run-time parameters about pods, as KFP's placeholders of them.

    `cpu`, `memory` and `accelerators` are per role; a role without accelerators has none in the latter.
    """

    cpu: dict[ImageRole, Any]
    memory: dict[ImageRole, Any]
    accelerators: dict[ImageRole, Any]
    accelerator: Any
    node_selector: Any
    tolerations: Any
    store_secret: Any
    store_config: Any
    pull_secret: Any


@dataclass(frozen=True)
class PodSettings:
    """What is compiled into the tasks: the specification's section `cluster`, and an image for every role."""

    cluster: ClusterSpec
    images: dict[ImageRole, str]

    def role(self, role: ImageRole) -> PodResources:
        """Resources of a role."""
        by_role: dict[ImageRole, PodResources] = {name: getattr(self.cluster, name) for name in ROLES}
        return by_role[role]


def placement_of(stage: str, cluster: ClusterSpec) -> Placement | None:
    """How a stage is spread over nodes, None when it runs in the task's own pod.

    The number of processes per node and the pull secret are known at run time only.
    """
    own = cluster.stages.get(stage_entry(stage).name)
    if own is None or own.nodes == 1:
        return None
    role: PodResources = getattr(cluster, stage_entry(stage).image)
    return Placement(
        nodes=own.nodes,
        deadline_seconds=60 * (own.timeout_minutes or role.timeout_minutes),
        scheduling_seconds=60 * own.scheduling_minutes,
        queue=cluster.queue or None,
        rdma=own.rdma,
        shared_memory=own.shared_memory or role.shared_memory,
        scratch=own.scratch or role.scratch,
        run_as_user=cluster.run_as_user,
        run_as_group=cluster.run_as_group,
    )


def apply_pod_settings(task: Any, stage: str, settings: PodSettings, runtime: RuntimeSettings) -> Any:
    """Give `task` its image, resources, volumes, secrets, limits and identity; return it.

    A task that only launches pods hands resources, node selector and tolerations on to them, through KFP.
    """
    cluster, entry = settings.cluster, stage_entry(stage)
    placement = placement_of(stage, cluster)
    role = entry.image
    image = settings.images[role if placement is None else "control"]
    resources, own = settings.role(role), cluster.stages.get(entry.name)

    def value(field: str) -> Any:
        """What the stage itself asks for, or None."""
        return None if own is None else getattr(own, field)

    task.set_caching_options(False)
    task.set_container_image(image)
    task.set_cpu_request(value("cpu") or runtime.cpu[role])
    memory = value("memory") or runtime.memory[role]
    task.set_memory_request(memory)
    task.set_memory_limit(memory)
    accelerators = value("accelerators")
    if accelerators is not None or role in runtime.accelerators:
        task.set_accelerator_type(runtime.accelerator)
        task.set_accelerator_limit(runtime.accelerators[role] if accelerators is None else accelerators)
    if role in runtime.accelerators:
        kubernetes.add_node_selector_json(task, runtime.node_selector)
        kubernetes.add_toleration_json(task, runtime.tolerations)
    retries = cluster.retries
    if retries.count:
        task.set_retry(
            retries.count,
            backoff_duration=f"{retries.backoff_seconds}s",
            backoff_factor=retries.factor,
            backoff_max_duration=f"{retries.max_seconds}s",
        )
    for name, directory in POD_DIRECTORIES.items():
        task.set_env_variable(name, directory)
    task.set_env_variable("PYTHONUNBUFFERED", "1")
    if "@" in image:
        task.set_env_variable(IMAGE_VARIABLE, image)

    if placement is not None:
        task.set_env_variable(WORKER_IMAGE_VARIABLE, settings.images[role])

    limit = 60 * (value("timeout_minutes") or resources.timeout_minutes)
    if placement is not None:  # it outlives its Job, to say how that ended and to give everything back
        limit += placement.scheduling_seconds + LAUNCHER_MARGIN_SECONDS
    kubernetes.set_timeout(task, limit)
    kubernetes.empty_dir_mount(task, "scratch", SCRATCH, size_limit=value("scratch") or resources.scratch)
    kubernetes.empty_dir_mount(
        task,
        "shared-memory",
        SHARED_MEMORY,
        medium="Memory",
        size_limit=value("shared_memory") or resources.shared_memory,
    )
    for volume in cluster.volumes:
        kubernetes.mount_pvc(task, pvc_name=volume.claim, mount_path=volume.mount_path)
    kubernetes.use_secret_as_env(task, runtime.store_secret, SECRET_KEYS, optional=True)
    kubernetes.use_config_map_as_env(task, runtime.store_config, CONFIG_KEYS, optional=True)
    if cluster.store_authority is not None:
        kubernetes.use_config_map_as_volume(task, cluster.store_authority.config_map, CERTIFICATES)
        task.set_env_variable("AWS_CA_BUNDLE", cluster.store_authority.path)
    kubernetes.set_image_pull_secrets(task, [runtime.pull_secret])
    kubernetes.set_security_context(
        task, run_as_user=cluster.run_as_user, run_as_group=cluster.run_as_group, run_as_non_root=True
    )
    kubernetes.add_pod_label(task, STAGE_LABEL, stage)
    if cluster.queue and placement is None:
        kubernetes.add_pod_label(task, QUEUE_LABEL, cluster.queue)
    return task

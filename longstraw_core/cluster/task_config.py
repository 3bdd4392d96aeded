"""KFP's `dsl.TaskConfig` as pod settings: what a person configured on the task goes to the pods it creates."""

import json
from typing import Any

from pydantic import Field

from longstraw_core.spec import SpecError
from longstraw_core.spec.model import StrictModel

SCRATCH = "/scratch"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
MAX_VARIABLE_BYTES = 131_000
"""Linux starts no process with one variable of 131,072 bytes (MAX_ARG_STRLEN), its name included."""
MAX_ENVIRONMENT_BYTES = 1 << 20
"""Of all variables: etcd takes objects of 1.5 MiB, and Linux an environment of about 2 MiB."""
OWN_VOLUMES = frozenset({"shared-memory", "scratch"})
"""Volumes that the pod template has itself; KFP's task has the same ones for its own pod."""
OWN_ENVIRONMENT = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "NNODES",
        "NODE_RANK",
        "NPROC_PER_NODE",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "JOB_COMPLETION_INDEX",
        "LONGSTRAW_HEARTBEAT",
        "LONGSTRAW_IMAGE",
        "LONGSTRAW_NODES",
        "LONGSTRAW_NODE_LEADER",
        "LONGSTRAW_NODE_RANK",
        "LONGSTRAW_RENDEZVOUS",
        "LONGSTRAW_REQUEST",
        "LONGSTRAW_STORE",
        "LONGSTRAW_TERMINATION_LOG",
    }
)
"""Variables of which only the plan may say the value: which rank a process is, what it runs and in what image."""


class PodSettings(StrictModel):
    """Fragments of a pod specification in the Kubernetes API's own spelling."""

    resources: dict[str, Any] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = Field(default_factory=dict)
    env: tuple[dict[str, Any], ...] = ()
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()


def pod_settings(task_config: object, *, defaults: PodSettings | None = None) -> PodSettings:
    """Read a `dsl.TaskConfig` (or None); a field that it leaves empty keeps its value from `defaults`.

    KFP writes requests and limits of extended resources apart; Kubernetes wants them equal, so a limit that has no
    request gets one.

    What the pod template says itself (`OWN_ENVIRONMENT`, `OWN_VOLUMES`) is left out: KFP sets some of it on the task
    for the launcher's own pod.

    Raises:
        SpecError: a variable, volume or mount is there twice.
    """
    base = defaults or PodSettings()
    fields = {
        "resources": getattr(task_config, "resources", None),
        "node_selector": getattr(task_config, "node_selector", None),
        "tolerations": getattr(task_config, "tolerations", None),
        "affinity": getattr(task_config, "affinity", None),
        "env": getattr(task_config, "env", None),
        "volumes": getattr(task_config, "volumes", None),
        "volume_mounts": getattr(task_config, "volume_mounts", None),
    }
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items() if value}
    settings = base.model_copy(update=given)
    settings = PodSettings.model_validate(settings.model_dump())
    settings = settings.model_copy(
        update={
            "resources": _with_requests(settings.resources),
            "env": tuple(item for item in settings.env if item.get("name") not in OWN_ENVIRONMENT),
            "volumes": tuple(item for item in settings.volumes if item.get("name") not in OWN_VOLUMES),
            "volume_mounts": tuple(item for item in settings.volume_mounts if item.get("name") not in OWN_VOLUMES),
        }
    )
    _refuse_twice("environment variable", [str(item.get("name")) for item in settings.env])
    _refuse_twice("volume", [str(item.get("name")) for item in settings.volumes])
    _refuse_twice("mount", [str(item.get("mountPath")) for item in settings.volume_mounts])
    return settings


def check_environment(settings: PodSettings) -> None:
    """Refuse variables with which no container would start.

    Raises:
        SpecError: one of them, or all together, are too large.
    """
    sizes = {str(item.get("name")): len(json.dumps(item, ensure_ascii=False).encode()) for item in settings.env}
    for name, size in sizes.items():
        if size > MAX_VARIABLE_BYTES:
            raise SpecError(
                f"environment variable {name} of the task has {size} bytes, the limit is {MAX_VARIABLE_BYTES}; "
                "put it into a file on a volume"
            )
    if sum(sizes.values()) > MAX_ENVIRONMENT_BYTES:
        raise SpecError(
            f"the task's environment has {sum(sizes.values())} bytes, the limit is {MAX_ENVIRONMENT_BYTES}; "
            "put what is large into files on a volume"
        )


def accelerators(settings: PodSettings, resource: str) -> int:
    """How many of an extended resource one pod gets, 0 when none.

    Raises:
        SpecError: the amount is not a whole number.
    """
    amount = str(settings.resources.get("limits", {}).get(resource, "0"))
    if not amount.isdecimal():
        raise SpecError(f"{resource}: {amount!r} is not a whole number of devices")
    return int(amount)


def _with_requests(resources: dict[str, Any]) -> dict[str, Any]:
    limits = {str(name): str(value) for name, value in (resources.get("limits") or {}).items()}
    requests = {str(name): str(value) for name, value in (resources.get("requests") or {}).items()}
    requests = {**{name: value for name, value in limits.items() if "/" in name}, **requests}
    return {name: part for name, part in (("limits", limits), ("requests", requests)) if part}


def _refuse_twice(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"{what} {name} of the task is there twice; keep one")

"""A multi-pod stage as its launcher sees it: reuse what is finished, else place pods, wait, verify the receipt."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longstraw_core.artifacts.store import open_store
from longstraw_core.cluster.api import ClusterApi, connect
from longstraw_core.cluster.journal import LauncherPod
from longstraw_core.cluster.launch import LaunchTimes, launch
from longstraw_core.cluster.placement import Placement, PlacementPlan, make_plan
from longstraw_core.cluster.task_config import PodSettings, accelerators, pod_settings
from longstraw_core.spec import IntegrityError, SpecError, StageFailed, canonical_json, sha256_digest
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.events import EventLog
from longstraw_core.stages.execute import StageOutcome, StageRequest, finished_stage
from longstraw_core.stages.node_spread import processes_per_node
from longstraw_core.stages.source import WORKER_IMAGE_VARIABLE
from longstraw_core.stages.work_request import WorkRequest, store_request

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
POD_NAME_VARIABLE, POD_UID_VARIABLE = "KFP_POD_NAME", "KFP_POD_UID"
"""KFP sets both in every task's container."""


def placement_plan(
    request: StageRequest,
    *,
    namespace: str,
    image: str,
    placement: Placement,
    pod: PodSettings,
    accelerators: int = 0,
) -> PlacementPlan:
    """The plan of a stage; reads and writes nothing, so that `longstraw plan` can print it.

    The specification decides how many processes a pod runs, whatever `placement` says; `accelerators`, of one pod,
    must suit that, or be 0 where the stage runs on CPUs.

    Raises:
        SpecError: the stage, the image or the store does not allow it.
    """
    entry = stage_entry(request.stage)
    each = processes_per_node(entry.name, request.spec, placement.nodes, accelerators)
    return make_plan(
        namespace=namespace,
        store=request.spec.storage.uri,
        run=request.run,
        transaction=request.transaction,
        stage=entry.name,
        spec_digest=sha256_digest(canonical_json(request.spec)),
        image=image,
        request=WorkRequest.of(entry.name, request).descriptor(),
        placement=placement.model_copy(update={"processes_per_node": each}),
        pod=pod,
    )


def launch_stage(
    request: StageRequest,
    *,
    image: str,
    placement: Placement,
    pod: PodSettings,
    accelerators: int = 0,
    api: ClusterApi | None = None,
    launcher: LauncherPod | None = None,
    say: Callable[[str], None] | None = None,
    times: LaunchTimes | None = None,
) -> StageOutcome:
    """Run a stage in pods of its own and return its receipt, or the receipt of an earlier execution.

    Raises:
        LongStrawError: what the pods or the cluster reported.
        IntegrityError: the receipt says that another image ran than the plan's.
        StageFailed: every pod ended well and there is no receipt.
    """
    entry = stage_entry(request.stage)
    finished = finished_stage(request)
    if finished is not None:
        return finished
    api = api or ClusterApi(connect(), namespace_of_this_pod())
    plan = placement_plan(
        request, namespace=api.namespace, image=image, placement=placement, pod=pod, accelerators=accelerators
    )
    log = EventLog(entry.name, request.run, request.transaction)
    log.emit("placement", **{name.replace(" ", "_"): value for name, value in plan.rows()})
    store = open_store(request.spec.storage.uri)
    store_request(store, WorkRequest.of(entry.name, request))

    def to_log(line: str) -> None:
        log.emit("cluster", message=line)

    launch(plan, store=store, api=api, launcher=launcher, say=say or to_log, times=times)
    outcome = finished_stage(request)
    if outcome is None:
        raise StageFailed(f"all pods of {entry.name} ended well and there is no receipt in {store.uri}; see their logs")
    observed = outcome.receipt.predicate.image_digest
    if observed != plan.image_digest:
        raise IntegrityError(
            f"{outcome.descriptor.uri}: expected image {plan.image_digest}, observed {observed}; do not use it"
        )
    return outcome


@dataclass(frozen=True)
class LaunchSettings:
    """What a task says about the pods it launches."""

    image: str
    placement: Placement
    pod: PodSettings
    accelerators: int
    """Of one pod; 0 where it has none."""


def launch_settings(arguments: Mapping[str, Any]) -> LaunchSettings | None:
    """Read the arguments of a KFP component that may launch pods; None where the stage runs in this process.

    KFP fills in `task_config` on a cluster only, so that the same pipeline runs on a machine without one.

    Raises:
        SpecError: the placement or the task's configuration is not valid, or no worker image is set.
    """
    config = arguments.get("task_config")
    if config is None or getattr(config, "resources", None) is None:
        return None
    image = os.environ.get(WORKER_IMAGE_VARIABLE)
    if not image:
        raise SpecError(f"{WORKER_IMAGE_VARIABLE} is not set; compile the pipeline with an image lock")
    try:
        placement = Placement.model_validate_json(arguments["placement"])
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise SpecError(f"placement: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; compile again") from error
    pod = pod_settings(config)
    secret = arguments.get("pull_secret")
    return LaunchSettings(
        image,
        placement.model_copy(update={"pull_secrets": (secret,) if secret else ()}),
        pod,
        accelerators(pod, str(arguments["accelerator"])),
    )


def namespace_of_this_pod(path: Path = NAMESPACE_FILE) -> str:
    """The namespace that the service account of this pod belongs to.

    Raises:
        SpecError: this is not a pod.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SpecError(
            f"{path}: {error.strerror}; multi-pod stages are launched from a pod of the pipeline"
        ) from error


def launcher_of_this_pod() -> LauncherPod | None:
    """This pod as KFP names it, None outside of KFP."""
    name, uid = os.environ.get(POD_NAME_VARIABLE), os.environ.get(POD_UID_VARIABLE)
    return LauncherPod(name=name, uid=uid) if name and uid else None

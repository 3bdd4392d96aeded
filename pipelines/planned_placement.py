"""The placement of a specification's multi-pod stages before anything runs, as the launcher will compute it."""

from collections.abc import Mapping
from typing import Any

from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.cluster.task_config import PodSettings, accelerators
from longstraw_core.spec import TransactionSpec
from longstraw_core.spec.cluster import CERTIFICATES, MULTI_POD_STAGES, ClusterSpec, PodResources
from longstraw_core.spec.images import ImageRole
from longstraw_core.spec.receipts import StageName
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.execute import StageRequest
from longstraw_core.stages.launcher import placement_plan
from longstraw_core.stages.node_spread import check_one_pod, processes_per_node
from pipelines.pods import placement_of


def planned_placements(
    spec: TransactionSpec, *, run: str, transaction: int, namespace: str, images: Mapping[ImageRole, str]
) -> list[PlacementPlan]:
    """Return the plan of every stage that the specification gives several nodes, in the order of the stages.

    Names, numbers of pods and processes are the launcher's own. Resources, node selector and tolerations are the
    specification's; the pipeline's run-time parameters may replace them.

    Args:
        spec: The specification as it is compiled.
        run: Name of the run.
        transaction: Number of the transaction, from 1.
        namespace: Where the pipeline's pods run.
        images: Image of every role, `repository@sha256:…`.

    Raises:
        SpecError: a stage cannot be spread so, an image is not pinned, or the store cannot be reached from all nodes.
    """
    plans: list[PlacementPlan] = []
    for stage in spread_stages(spec):
        placement, pod = placement_of(stage, spec.cluster), planned_pod(stage, spec.cluster)
        if placement is None:
            continue
        plans.append(
            placement_plan(
                StageRequest(stage=stage, spec=spec, run=run, transaction=transaction),
                namespace=namespace,
                image=images[stage_entry(stage).image],
                placement=placement.model_copy(update={"pull_secrets": (spec.cluster.pull_secret,)}),
                pod=pod,
                accelerators=accelerators(pod, spec.cluster.accelerator),
            )
        )
    return plans


def spread_stages(spec: TransactionSpec) -> tuple[StageName, ...]:
    """Return the stages with several nodes.

    Raises:
        SpecError: one of them cannot be spread so.
    """
    found: list[StageName] = []
    for stage in MULTI_POD_STAGES:
        placement = placement_of(stage, spec.cluster)
        if placement is not None:
            each = accelerators(planned_pod(stage, spec.cluster), spec.cluster.accelerator)
            processes_per_node(stage, spec, placement.nodes, each)
            found.append(stage)
    return tuple(found)


def check_spread(spec: TransactionSpec) -> None:
    """Refuse numbers of nodes that a stage's launcher would refuse, whatever accelerators its pods get at run time.

    Raises:
        SpecError: naming the stage, its nodes and what they must suit.
    """
    for stage in MULTI_POD_STAGES:
        placement = placement_of(stage, spec.cluster)
        if placement is not None or stage == "sample":
            processes_per_node(stage, spec, 1 if placement is None else placement.nodes, accelerators=0)


def check_accelerators(spec: TransactionSpec, parameters: Mapping[str, Any]) -> None:
    """Refuse numbers of accelerators that do not suit a stage's ranks, with a run's parameters in effect.

    Raises:
        SpecError: naming the stage, its ranks per pod and the accelerators that a pod would have.
    """
    changed: dict[str, PodResources] = {}
    for role in ("trainer", "sampler"):
        if f"{role}_accelerators" in parameters:
            resources: PodResources = getattr(spec.cluster, role)
            count = int(parameters[f"{role}_accelerators"])
            changed[role] = resources.model_copy(update={"accelerators": count})
    effective = spec.model_copy(update={"cluster": spec.cluster.model_copy(update=changed)})
    spread = spread_stages(effective)
    for stage in MULTI_POD_STAGES:
        if stage not in spread:
            pod = planned_pod(stage, effective.cluster)
            check_one_pod(stage, effective, accelerators(pod, effective.cluster.accelerator))


def planned_pod(stage: StageName, cluster: ClusterSpec) -> PodSettings:
    """Return what the task's configuration says where every run-time parameter has its default."""
    role: PodResources = getattr(cluster, stage_entry(stage).image)
    own = cluster.stages.get(stage)

    def value(field: str) -> str:
        stated = None if own is None else getattr(own, field)
        return str(getattr(role, field) if stated is None else stated)

    authority = cluster.store_authority
    certificates = () if authority is None else (authority.config_map,)
    devices = {} if value("accelerators") == "0" else {cluster.accelerator: value("accelerators")}
    memory = {"memory": value("memory")}
    return PodSettings(
        resources={"limits": memory | devices, "requests": {"cpu": value("cpu")} | memory | devices},
        node_selector=dict(cluster.node_selector),
        tolerations=tuple(toleration.to_kubernetes() for toleration in cluster.tolerations),
        volumes=(
            *(
                {"name": volume.claim, "persistentVolumeClaim": {"claimName": volume.claim}}
                for volume in cluster.volumes
            ),
            *({"name": name, "configMap": {"name": name}} for name in certificates),
        ),
        volume_mounts=(
            *({"name": volume.claim, "mountPath": volume.mount_path} for volume in cluster.volumes),
            *({"name": name, "mountPath": CERTIFICATES} for name in certificates),
        ),
    )

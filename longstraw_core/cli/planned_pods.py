"""What `longstraw plan` says of stages of several pods: as records and as tables."""

import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstraw_core.artifacts.receipts import receipt_name
from longstraw_core.cli.output import console, make_table
from longstraw_core.spec import SpecError, TransactionSpec

if TYPE_CHECKING:
    from longstraw_core.cluster.placement import PlacementPlan

DIGEST_ROW = "plan"
"""The launcher's digest also covers receipts of the stages before, and the task's variables: not known beforehand."""

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def plan_pods(
    spec: TransactionSpec, *, run: str, transaction: int, namespace: str, images: Path | None
) -> "list[PlacementPlan]":
    """Return the placement of the stages with several nodes; without an image lock none, said on standard error.

    Raises:
        SpecError: a stage cannot be spread over that many nodes, no run or namespace can have that name, or the lock
            cannot be read.
    """
    receipt_name(run, transaction, "train")
    if _NAMESPACE.fullmatch(namespace) is None:
        raise SpecError(f"--namespace {namespace!r}: must be 1 to 63 of a-z 0-9 - and begin and end without -")
    if not any(stage.nodes > 1 for stage in spec.cluster.stages.values()):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from components.images import image_lock, pipeline_images
        from pipelines.planned_placement import planned_placements, spread_stages
    stages = spread_stages(spec)
    lock = image_lock(images)
    if not lock:
        print(
            f"longstraw: the pods of {', '.join(stages)} are not planned: no image is published in "
            "images/images.lock.json; give --images",
            file=sys.stderr,
        )
        return []
    return planned_placements(spec, run=run, transaction=transaction, namespace=namespace, images=pipeline_images(lock))


def placement_record(plan: "PlacementPlan") -> dict[str, Any]:
    """Return a placement as a JSON object."""
    return {
        "stage": plan.stage,
        "name": plan.name,
        "namespace": plan.namespace,
        "image": plan.image,
        "pods": plan.placement.nodes,
        "processes": plan.world_size,
        "processes_per_pod": plan.placement.processes_per_node,
        "rendezvous": dict(plan.rows())["rendezvous"],
        "hosts": [plan.pod_host(index) for index in range(plan.placement.nodes)],
        "resources_per_pod": plan.pod.resources,
        "node_selector": plan.pod.node_selector,
        "queue": plan.placement.queue,
        "deadline_seconds": plan.placement.deadline_seconds,
        "scheduling_seconds": plan.placement.scheduling_seconds,
    }


def print_placements(plans: "list[PlacementPlan]") -> None:
    """Print one table per stage."""
    for plan in plans:
        rows = [(name, value) for name, value in plan.rows() if name != DIGEST_ROW]
        console().print(make_table(("pods", "value"), rows, f"Placement of {plan.stage}"))

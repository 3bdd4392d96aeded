"""Checks of the cluster: KFP's version, permissions, accelerators, queue, images."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from longstraw_core.cluster.permissions import Permission
from longstraw_core.doctor.check import Skipped
from longstraw_core.kubeflow.kubernetes_access import TIMEOUT_SECONDS, KubernetesAccess, NotAllowed, kubernetes_errors
from longstraw_core.kubeflow.permissions import missing_permissions
from longstraw_core.kubeflow.registry import check_image
from longstraw_core.kubeflow.server import KubeflowServer
from longstraw_core.spec.cluster import ClusterSpec
from longstraw_core.spec.errors import LongStrawError, SpecError

QUEUE_API = ("kueue.x-k8s.io", "v1beta1", "localqueues")


def check_kubeflow(server: KubeflowServer) -> str:
    """Compare the server's version with the SDK's: an older server refuses fields of newer pipelines.

    Raises:
        SpecError: the server is older (by its minor version), or says no version.
    """
    version, sdk = server.version(), metadata.version("kfp")
    number = re.match(r"v?(\d+)\.(\d+)", version or "")
    if version is None or number is None:
        raise SpecError(f"{server.endpoint} answers but does not say its version ({version!r}); the SDK is {sdk}")
    major, minor = (int(part) for part in sdk.split(".")[:2])
    if (int(number[1]), int(number[2])) < (major, minor):
        raise SpecError(f"{server.endpoint} is KFP {version}, older than the SDK {sdk} that compiles pipelines")
    return f"{server.endpoint}: KFP {version}, SDK {sdk}"


def check_permissions(access: KubernetesAccess, permissions: Iterable[Permission]) -> str:
    """Ask for every verb that is used.

    Raises:
        SpecError: naming those that are denied.
    """
    asked = tuple(permissions)
    missing = missing_permissions(access, asked)
    if missing:
        wanted = "; ".join(f"{permission} ({permission.why})" for permission in missing)
        raise SpecError(f"namespace {access.namespace}: not allowed to {wanted}")
    return f"namespace {access.namespace}: all {len(asked)} permissions"


@contextmanager
def _skipped_where_not_allowed() -> Iterator[None]:
    """No stage reads nodes or queues, so an account that may not read them lacks nothing: the check is skipped."""
    try:
        yield
    except NotAllowed as error:
        raise Skipped(str(error)) from error


def check_accelerators(access: KubernetesAccess, cluster: ClusterSpec) -> str:
    """Sum what the nodes offer of the specification's accelerator.

    Raises:
        SpecError: no node that the node selector allows has as many as one pod asks for.
        Skipped: no stage asks for any, or this account may not list nodes.
    """
    from kubernetes import client

    most = max(cluster.trainer.accelerators, cluster.sampler.accelerators)
    if most == 0:
        raise Skipped("no stage asks for accelerators")
    with _skipped_where_not_allowed(), kubernetes_errors(access.server, "listing nodes"):
        nodes: Any = client.CoreV1Api(access.client).list_node(_request_timeout=TIMEOUT_SECONDS)
    selected = [
        int((node.status.allocatable or {}).get(cluster.accelerator, 0))
        for node in nodes.items
        if cluster.node_selector.items() <= (node.metadata.labels or {}).items()
    ]
    if not any(count >= most for count in selected):
        raise SpecError(
            f"{cluster.accelerator}: a pod asks for {most}, the largest of {len(selected)} selected nodes has "
            f"{max(selected, default=0)}"
        )
    return f"{cluster.accelerator}: {sum(selected)} on {len(selected)} selected nodes"


def check_queue(access: KubernetesAccess, cluster: ClusterSpec) -> str:
    """Look the specification's queue up.

    Raises:
        SpecError: there is none of this name, or it is not active.
        Skipped: the specification names none, or this account may not read queues.
    """
    from kubernetes import client

    if cluster.queue is None:
        raise Skipped("cluster.queue is not set")
    group, version, plural = QUEUE_API
    with (
        _skipped_where_not_allowed(),
        kubernetes_errors(access.server, f"reading queue {cluster.queue} in {access.namespace}"),
    ):
        queue: Any = client.CustomObjectsApi(access.client).get_namespaced_custom_object(
            group, version, access.namespace, plural, cluster.queue, _request_timeout=TIMEOUT_SECONDS
        )
    for condition in queue.get("status", {}).get("conditions", ()):
        if condition.get("type") == "Active" and condition.get("status") != "True":
            raise SpecError(f"queue {cluster.queue} is not active: {condition.get('message', '')}")
    return f"queue {cluster.queue}: {queue.get('status', {}).get('pendingWorkloads', 0)} workloads wait"


def check_images(lock: Mapping[str, str]) -> str:
    """Ask the registries for every image of the lock.

    Raises:
        SpecError: naming every image that cannot be pulled, with the reason.
        Skipped: there is no lock.
    """
    if not lock:
        raise Skipped("there is no image lock")
    faults: list[str] = []
    for reference in dict.fromkeys(lock.values()):
        try:
            check_image(reference)
        except LongStrawError as error:
            faults.append(str(error))
    if faults:
        raise SpecError("; ".join(faults))
    return f"{len(set(lock.values()))} images are there"

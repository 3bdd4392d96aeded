"""What the servers refuse: the fake must never accept what the real one does not."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

from longstraw_core.cluster.api import Conflict, Exists, Expired, Unreachable
from longstraw_core.cluster.manifests import job_manifest, service_manifest
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.cluster.task_config import PodSettings
from longstraw_core.spec import SpecError
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually

Plan = Callable[..., PlacementPlan]


def changed(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which the field at a dotted path has another value."""
    result = copy.deepcopy(manifest)
    target: Any = result
    *parents, last = path.split(".")
    for part in parents:
        target = target[int(part)] if part.isdecimal() else target[part]
    target[int(last) if last.isdecimal() else last] = value
    return result


POD = "spec.template.spec"
JOB_FAULTS = {
    "unknown field": ("spec.completion", 2),
    "wrong type": ("spec.completions", "2"),
    "no name": ("metadata.name", ""),
    "bad name": ("metadata.name", "Upper_Case"),
    "bad label value": ("metadata.labels.x", "a b"),
    "bad label key": ("metadata.labels.a b", "x"),
    "restart policy": (f"{POD}.restartPolicy", "Always"),
    "no completions": ("spec.completions", None),
    "negative": ("spec.backoffLimit", -1),
    "replacement policy": ("spec.podReplacementPolicy", "TerminatingOrFailed"),
    "unknown container in the policy": ("spec.podFailurePolicy.rules.1.onExitCodes.containerName", "other"),
    "unordered codes": ("spec.podFailurePolicy.rules.1.onExitCodes.values", [3, 1]),
    "zero with In": ("spec.podFailurePolicy.rules.1.onExitCodes", {"operator": "In", "values": [0]}),
    "unknown volume": (f"{POD}.containers.0.volumeMounts.0.name", "missing"),
    "mount twice": (f"{POD}.containers.0.volumeMounts.0.mountPath", "/scratch"),
    "volume twice": (f"{POD}.volumes.0.name", "scratch"),
    "no image": (f"{POD}.containers.0.image", ""),
    "bad quantity": (f"{POD}.containers.0.resources.limits.memory", "64 GB"),
    "device without limit": (f"{POD}.containers.0.resources.limits", {"memory": "64Gi"}),
    "request above limit": (f"{POD}.containers.0.resources.requests.memory", "65Gi"),
    "bad variable": (f"{POD}.containers.0.env.0.name", "a=b"),
    "owner without uid": ("metadata.ownerReferences", [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": ""}]),
}


@pytest.mark.parametrize("fault", JOB_FAULTS)
def test_a_job_with_a_fault_is_refused(fault: str, api_server: Cluster, make_test_plan: Plan) -> None:
    plan = make_test_plan(namespace=api_server.namespace)
    good = job_manifest(plan, intent="0" * 32, owner=None)
    path, value = JOB_FAULTS[fault]
    with pytest.raises(SpecError, match="refuses it"):
        api_server.api().create("Job", changed(good, path, value))
    api_server.api().create("Job", good)


def test_what_exists_is_not_created_again(api_server: Cluster, make_test_plan: Plan) -> None:
    manifest = service_manifest(make_test_plan(namespace=api_server.namespace), intent="0" * 32, owner=None)
    api_server.api().create("Service", manifest)
    with pytest.raises(Exists):
        api_server.api().create("Service", manifest)


def test_a_deletion_of_another_uid_is_refused(api_server: Cluster, make_test_plan: Plan) -> None:
    plan = make_test_plan(namespace=api_server.namespace)
    made = api_server.api().create("Service", service_manifest(plan, intent="0" * 32, owner=None))
    other = "00000000-0000-4000-8000-000000000000"
    assert not api_server.api().delete("Service", plan.name, other)
    assert len(api_server.services()) == 1
    assert api_server.api().delete("Service", plan.name, made["metadata"]["uid"])
    assert not api_server.api().delete("Service", plan.name, made["metadata"]["uid"])


def test_owners_are_replaced_only_on_the_version_that_was_read(api_server: Cluster, make_test_plan: Plan) -> None:
    plan = make_test_plan(namespace=api_server.namespace)
    pod = api_server.kubelet.create_pod("launcher", "registry.example/control:1")
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "launcher", "uid": pod["metadata"]["uid"]}
    made = api_server.api().create("Service", service_manifest(plan, intent="0" * 32, owner=None))
    updated = api_server.api().set_owners("Service", made, [owner], {})
    assert updated["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    with pytest.raises(Conflict):
        api_server.api().set_owners("Service", made, [owner], {"a": "b"})


def test_a_jobs_template_cannot_change(api_server: Cluster, make_test_plan: Plan) -> None:
    plan = make_test_plan(namespace=api_server.namespace)
    api_server.api().create("Job", job_manifest(plan, intent="0" * 32, owner=None))
    with pytest.raises(LookupError, match=r"422.*immutable"):
        api_server.kubelet.request(
            "PATCH",
            f"/apis/batch/v1/namespaces/{api_server.namespace}/jobs/{plan.name}",
            {"spec": {"template": {"spec": {"subdomain": "other"}}}},
            **{"Content-Type": "application/merge-patch+json"},
        )


def test_a_watch_tells_what_happened_after_its_version(cluster: Cluster, make_test_plan: Plan) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    api = cluster.api()
    api.create("Job", job_manifest(plan, intent="0" * 32, owner=None))
    (job,), version = api.list_all("jobs", f"metadata.name={plan.name}")
    seen: list[tuple[str, str]] = []

    def follow() -> None:
        try:
            for event in api.watch("jobs", f"metadata.name={plan.name}", version):
                seen.append((event["type"], event["object"]["metadata"].get("uid", "")))
        except Unreachable:
            return

    threading.Thread(target=follow, daemon=True).start()
    api.delete("Job", plan.name, job["metadata"]["uid"])
    eventually(lambda: ("DELETED", job["metadata"]["uid"]) in seen, "the deletion is seen")
    cluster.proxy.drop()


def test_a_version_that_is_forgotten_is_expired(fake: Cluster, make_test_plan: Plan) -> None:
    _, version = fake.api().list_all("pods", "a=b")
    assert fake.fake is not None
    fake.fake.storage.compact()
    with pytest.raises(Expired):
        list(fake.api().watch("pods", "a=b", version))


def test_a_watch_without_events_brings_bookmarks(fake: Cluster) -> None:
    _, version = fake.api().list_all("pods", "a=b")
    fake.kubelet.create_pod("elsewhere", "registry.example/x:1")
    event = next(fake.api().watch("pods", "a=b", version))
    assert event["type"] == "BOOKMARK"
    assert int(event["object"]["metadata"]["resourceVersion"]) > int(version)


def test_rights_end_at_the_namespace(api_server: Cluster) -> None:
    api = api_server.api()
    for namespace in ("default", "kube-system"):
        api.namespace = namespace
        with pytest.raises(SpecError, match="cannot list resource"):
            api.list_all("pods", "a=b")
        with pytest.raises(SpecError, match="cannot get resource"):
            api.get("Job", "x")


def test_a_namespace_that_is_not_there_takes_nothing(api_server: Cluster, make_test_plan: Plan) -> None:
    manifest = service_manifest(make_test_plan(namespace="nowhere"), intent="0" * 32, owner=None)
    with pytest.raises(LookupError, match='404 namespaces "nowhere" not found'):
        api_server.kubelet.request("POST", "/api/v1/namespaces/nowhere/services", manifest)


def test_a_selector_that_there_is_not_is_refused(api_server: Cluster) -> None:
    with pytest.raises(SpecError, match="field label not supported"):
        api_server.api().list_all("jobs", "spec.parallelism=2")
    with pytest.raises(SpecError, match="unable to parse requirement"):
        api_server.api().list_all("pods", "a b=c")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spec": {"completion": 1}}, "unknown field|strict decoding"),
        ({"metadata": {"labels": {"x": "a b"}}}, "422"),
        ({"metadata": {"annotations": {"x": "y" * (257 << 10)}}}, "Too long"),
        ({"spec": {"completionMode": "NonIndexed"}}, "immutable"),
        ({"metadata": {"resourceVersion": "1"}}, "409"),
    ],
)
def test_a_change_is_checked_like_a_creation(
    change: dict[str, Any], words: str, api_server: Cluster, make_test_plan: Plan
) -> None:
    plan = make_test_plan(namespace=api_server.namespace)
    api_server.api().create("Job", job_manifest(plan, intent="0" * 32, owner=None))
    path = f"/apis/batch/v1/namespaces/{api_server.namespace}/jobs/{plan.name}?fieldValidation=Strict"
    with pytest.raises(LookupError, match=words):
        api_server.kubelet.request("PATCH", path, change, **{"Content-Type": "application/merge-patch+json"})


def test_a_job_that_is_deleted_without_a_policy_leaves_its_pods(cluster: Cluster, make_test_plan: Plan) -> None:
    """What the launcher must not do: its pods would go on holding their nodes."""
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    made = cluster.api().create("Job", job_manifest(plan, intent="0" * 32, owner=None))
    pods = cluster.kubelet.wait_for_pods(plan.name, 2)
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/{plan.name}"
    cluster.kubelet.request("DELETE", path, {"preconditions": {"uid": made["metadata"]["uid"]}})
    eventually(lambda: cluster.jobs() == [], "the Job is gone")
    left = cluster.kubelet.pods(plan.name)
    assert [pod["metadata"]["name"] for pod in left] == [pod["metadata"]["name"] for pod in pods]
    assert all(not pod["metadata"].get("ownerReferences") for pod in left)


def test_options_of_a_deletion_are_checked(api_server: Cluster, make_test_plan: Plan) -> None:
    plan = make_test_plan(namespace=api_server.namespace)
    api_server.api().create("Service", service_manifest(plan, intent="0" * 32, owner=None))
    path = f"/api/v1/namespaces/{api_server.namespace}/services/{plan.name}"
    with pytest.raises(LookupError, match="422"):
        api_server.kubelet.request("DELETE", path, {"propagationPolicy": "Cascade"})
    assert len(api_server.services()) == 1


def test_a_pod_whose_claim_is_not_there_gets_no_node(cluster: Cluster, make_test_plan: Plan) -> None:
    claim = PodSettings(
        volumes=({"name": "data", "persistentVolumeClaim": {"claimName": "missing"}},),
        volume_mounts=({"name": "data", "mountPath": "/"},),
    )
    plan = make_test_plan(namespace=cluster.namespace, pod=claim)
    cluster.kubelet.add_nodes(2)
    cluster.api().create("Job", job_manifest(plan, intent="0" * 32, owner=None))

    def unscheduled() -> bool:
        pods = cluster.kubelet.pods(plan.name)
        conditions = [item for pod in pods for item in pod["status"].get("conditions", [])]
        return len(pods) == 2 and [item["reason"] for item in conditions] == ["Unschedulable"] * 2

    eventually(unscheduled, "no pod has a node")

"""A stage in several pods: what is created, watched, printed, checked, and given back."""

from collections.abc import Callable

import pytest

from longstraw_core.artifacts import FileStore
from longstraw_core.cluster.journal import read_attempts
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.spec import IntegrityError, NumericError, Retryable, SpecError, StageFailed
from tests.cluster.conftest import IMAGE_ID, Launched, launch_in_thread
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually

Plan = Callable[..., PlacementPlan]
Start = Callable[..., Launched]


def run_all(cluster: Cluster, name: str, count: int = 2) -> list[dict]:
    pods = cluster.kubelet.wait_for_pods(name, count)
    for pod in pods:
        cluster.kubelet.start(pod, IMAGE_ID)
    return pods


def finish_all(cluster: Cluster, name: str, count: int = 2) -> None:
    for pod in run_all(cluster, name, count):
        cluster.kubelet.succeed(pod, IMAGE_ID)


def test_a_stage_completes_and_leaves_nothing(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)

    pods = run_all(cluster, plan.name)
    assert {pod["spec"]["nodeName"] for pod in pods} == {f"{cluster.namespace}-node-0", f"{cluster.namespace}-node-1"}
    cluster.kubelet.logs.write(pods[0]["metadata"]["name"], "step 1 of 1")
    cluster.kubelet.logs.write(pods[0]["metadata"]["name"], "a forged \x1b[31mline")
    eventually(lambda: any("step 1 of 1" in line for line in launched.lines), "rank 0's log is shown")
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "progress is shown")
    for pod in pods:
        cluster.kubelet.succeed(pod, IMAGE_ID)

    assert launched.wait() is None
    assert "rank 0 | step 1 of 1" in launched.lines
    assert "rank 0 | a forged ?[31mline" in launched.lines
    eventually(lambda: cluster.held() == [], "everything is given back")
    (attempt,) = read_attempts(store, "demo")
    assert attempt.closed
    assert attempt.live == {}
    assert sorted(attempt.owned.values()) == ["Job", "Service"]


def test_the_intent_is_stored_before_anything_is_created(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore
) -> None:
    cluster.proxy.refuse()
    launched = start_launch(make_test_plan(namespace=cluster.namespace))
    (attempt,) = eventually(lambda: list(read_attempts(store, "demo")), "the intent is stored")
    assert attempt.owned == {}
    assert cluster.held() == []
    cluster.proxy.refusing = False
    cluster.kubelet.add_nodes(2)
    finish_all(cluster, attempt.intent.name)
    assert launched.wait() is None


def test_a_crashing_rank_fails_the_stage_with_its_own_error(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    pods = run_all(cluster, plan.name)
    cluster.kubelet.logs.write(pods[1]["metadata"]["name"], "loss is nan")
    cluster.kubelet.crash(
        pods[1], IMAGE_ID, 12, '{"error": "NumericError", "exit_code": 12, "message": "loss of step 3 is not finite"}'
    )

    error = launched.wait()
    assert isinstance(error, NumericError)
    assert "loss of step 3 is not finite" in str(error)
    assert pods[1]["metadata"]["name"] in str(error)
    assert f"{pods[1]['metadata']['name']} | loss is nan" in launched.lines
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_an_evicted_pod_can_be_tried_again(cluster: Cluster, make_test_plan: Plan, start_launch: Start) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    cluster.kubelet.evict(run_all(cluster, plan.name)[0], IMAGE_ID)

    error = launched.wait()
    assert isinstance(error, Retryable)
    assert "low on resource: memory" in str(error)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_pod_out_of_memory_is_named_so(cluster: Cluster, make_test_plan: Plan, start_launch: Start) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    cluster.kubelet.crash(run_all(cluster, plan.name)[0], IMAGE_ID, 137, reason="OOMKilled")
    error = launched.wait()
    assert isinstance(error, StageFailed)
    assert "killed for its memory" in str(error)


def test_an_image_that_cannot_be_pulled_fails_the_stage(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    cluster.kubelet.cannot_pull(cluster.kubelet.wait_for_pods(plan.name, 2)[1])

    error = launched.wait()
    assert isinstance(error, SpecError)
    assert "manifest unknown" in str(error)
    assert plan.image in str(error)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_name_that_is_no_image_fails_the_stage_at_once(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    cluster.kubelet.cannot_pull(cluster.kubelet.wait_for_pods(plan.name, 2)[1], "InvalidImageName")
    assert isinstance(launched.wait(), SpecError)


def test_a_pod_in_another_image_is_not_believed(cluster: Cluster, make_test_plan: Plan, start_launch: Start) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    pods = cluster.kubelet.wait_for_pods(plan.name, 2)
    cluster.kubelet.start(pods[0], IMAGE_ID)
    cluster.kubelet.start(pods[1], "registry.example/longstraw/trainer@sha256:" + "cd" * 32)

    error = launched.wait()
    assert isinstance(error, IntegrityError)
    assert "sha256:" + "cd" * 32 in str(error)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_completed_job_whose_images_nobody_saw_is_not_believed(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    for pod in cluster.kubelet.wait_for_pods(plan.name, 2):
        cluster.kubelet.succeed(pod, "")
    error = launched.wait()
    assert isinstance(error, IntegrityError)
    assert "has not been seen" in str(error)


def test_without_nodes_the_scheduler_is_quoted(cluster: Cluster, make_test_plan: Plan, start_launch: Start) -> None:
    cluster.kubelet.add_nodes(1)
    error = start_launch(make_test_plan(namespace=cluster.namespace, scheduling_seconds=2)).wait()
    assert isinstance(error, Retryable)
    assert "nodes are available" in str(error)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_quota_that_keeps_pods_from_being_created_is_named(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    cluster.create_quota(pods=2)  # the launcher's own, and one of two workers
    cluster.kubelet.add_nodes(2)
    error = start_launch(make_test_plan(namespace=cluster.namespace, scheduling_seconds=2)).wait()
    assert isinstance(error, Retryable)
    assert "exceeded quota: team" in str(error)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_queue_that_admits_nothing_holds_nothing(cluster: Cluster, make_test_plan: Plan, start_launch: Start) -> None:
    plan = make_test_plan(namespace=cluster.namespace, queue="gpu", scheduling_seconds=2)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    (job,) = eventually(cluster.jobs, "the Job")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    error = launched.wait()
    assert isinstance(error, Retryable)
    assert "queue gpu has not admitted" in str(error)
    assert cluster.kubelet.pods(plan.name) == []


def test_a_job_that_somebody_else_deletes_is_noticed(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    run_all(cluster, plan.name)
    cluster.kubelet.request(
        "DELETE", f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/{plan.name}", {"propagationPolicy": "Background"}
    )
    error = launched.wait()
    assert isinstance(error, Retryable)
    assert "was deleted" in str(error)
    eventually(lambda: cluster.held() == [], "the Service goes with its Job")


def test_an_object_of_that_name_that_is_not_ours_is_left_alone(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name, "namespace": cluster.namespace},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    }
    made = cluster.kubelet.request("POST", f"/api/v1/namespaces/{cluster.namespace}/services", foreign)
    error = start_launch(plan).wait()
    assert isinstance(error, SpecError)
    assert "no journal" in str(error)
    (left,) = cluster.services()
    assert left["metadata"]["uid"] == made["metadata"]["uid"]


@pytest.mark.parametrize("fault", ["dropped watch", "slow", "outage"])
def test_the_connection_to_the_server_may_be_bad(
    fault: str, cluster: Cluster, make_test_plan: Plan, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    if fault == "slow":
        cluster.proxy.delay = 0.3
    launched = start_launch(plan)
    pods = run_all(cluster, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "pods run")
    if fault == "dropped watch":
        for _ in range(3):
            cluster.proxy.drop()
    elif fault == "outage":
        with cluster.proxy.outage():
            eventually(lambda: any("does not answer" in line for line in launched.lines), "the outage is noticed")
            for pod in pods:
                cluster.kubelet.succeed(pod, IMAGE_ID)
        eventually(lambda: any("answers again" in line for line in launched.lines), "its end is noticed")
    if fault != "outage":
        for pod in pods:
            cluster.kubelet.succeed(pod, IMAGE_ID)
    assert launched.wait() is None
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_forgotten_resource_version_is_listed_anew(fake: Cluster, make_test_plan: Plan, store: FileStore) -> None:
    plan = make_test_plan()
    fake.kubelet.add_nodes(2)
    launched = launch_in_thread(fake, store, plan)
    pods = run_all(fake, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "pods run")
    assert fake.fake is not None
    # the watches are cut, and when they come back their version is forgotten: only a list tells what happened
    fake.proxy.refuse()
    for pod in pods:
        fake.kubelet.succeed(pod, IMAGE_ID)
    fake.fake.storage.compact()
    fake.proxy.refusing = False
    assert launched.wait() is None

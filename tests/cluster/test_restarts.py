"""A launcher that was killed and starts again: adopts what is good, replaces what is not, deletes what is left."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from longstraw_core.artifacts import FileStore
from longstraw_core.cluster.api import ClusterApi, Conflict
from longstraw_core.cluster.cleanup import clean_up
from longstraw_core.cluster.journal import Attempt, open_attempt, read_attempts
from longstraw_core.cluster.manifests import Owner, job_manifest, service_manifest
from longstraw_core.cluster.placement import PlacementPlan
from tests.cluster.conftest import IMAGE_ID, Launched, LauncherProcess, launcher_pod
from tests.cluster.test_launch import finish_all, run_all
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually

Plan = Callable[..., PlacementPlan]
Start = Callable[..., Launched]
StartProcess = Callable[..., LauncherProcess]


def attempts(store: FileStore) -> list[Attempt]:
    return list(read_attempts(store, "demo"))


def kill(launched: LauncherProcess, cluster: Cluster) -> None:
    """The process dies at once; its pod object stays, failed, as KFP leaves it."""
    launched.process.send_signal(signal.SIGKILL)
    launched.process.wait()
    cluster.kubelet.set_phase(launched.pod.name, "Failed")


def test_a_restarted_launcher_adopts_the_running_job(
    cluster: Cluster, make_test_plan: Plan, start_process: StartProcess, start_launch: Start, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    first = start_process(plan)
    pods = run_all(cluster, plan.name)
    first.says("2 of 2 pods have started")
    (job,) = cluster.jobs()
    kill(first, cluster)

    second = start_launch(plan, pod="launcher-2")
    eventually(lambda: any("Job" in line and "adopted" in line for line in second.lines), "the Job is adopted")
    eventually(lambda: attempts(store)[0].closed, "the first attempt's journal is closed")
    (adopted,) = cluster.jobs()
    assert adopted["metadata"]["uid"] == job["metadata"]["uid"]
    assert [owner["name"] for owner in adopted["metadata"]["ownerReferences"]] == ["launcher-2"]
    # now the first launcher's pod may go: the Job is no longer its
    cluster.kubelet.delete_pod("launcher")
    for pod in pods:
        cluster.kubelet.succeed(pod, IMAGE_ID)
    assert second.wait() is None
    eventually(lambda: cluster.held() == [], "everything is given back")
    assert all(attempt.closed and not attempt.live for attempt in attempts(store))


def test_a_job_that_failed_meanwhile_is_replaced(
    cluster: Cluster, make_test_plan: Plan, start_process: StartProcess, start_launch: Start
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    first = start_process(plan)
    pods = run_all(cluster, plan.name)
    first.says("2 of 2 pods have started")
    (job,) = cluster.jobs()
    kill(first, cluster)
    cluster.kubelet.crash(pods[0], IMAGE_ID, 76)
    eventually(lambda: cluster.jobs()[0]["status"].get("conditions"), "the Job has failed")

    second = start_launch(plan, pod="launcher-2")
    eventually(
        lambda: [item["metadata"]["uid"] for item in cluster.jobs()] not in ([], [job["metadata"]["uid"]]), "a new Job"
    )
    finish_all(cluster, plan.name)
    assert second.wait() is None
    assert any("is replaced" in line for line in second.lines)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_job_of_another_plan_is_replaced(
    cluster: Cluster, make_test_plan: Plan, start_process: StartProcess, start_launch: Start
) -> None:
    cluster.kubelet.add_nodes(3)
    old = make_test_plan(namespace=cluster.namespace)
    first = start_process(old)
    run_all(cluster, old.name)
    first.says("2 of 2 pods have started")
    kill(first, cluster)

    new = make_test_plan(namespace=cluster.namespace, nodes=3)
    assert (new.name, new.digest != old.digest) == (old.name, True)
    second = start_launch(new, pod="launcher-2")
    finish_all(cluster, new.name, 3)
    assert second.wait() is None
    assert any("its plan is another" in line for line in second.lines)
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_job_whose_status_changes_while_it_is_adopted_is_owned_all_the_same(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    died_while_creating(cluster, store, plan)
    set_owners, conflicts = ClusterApi.set_owners, iter([True, True])

    def changed_meanwhile(self: ClusterApi, kind: str, *arguments: Any) -> Any:
        if kind == "Job" and next(conflicts, False):
            raise Conflict("the object has been modified")
        return set_owners(self, kind, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ClusterApi, "set_owners", changed_meanwhile)
    second = start_launch(plan, pod="launcher-2")
    finish_all(cluster, plan.name)
    assert second.wait() is None
    eventually(lambda: cluster.held() == [], "everything is given back")
    assert all(attempt.closed and not attempt.live for attempt in attempts(store))


def test_objects_whose_uid_was_never_stored_are_found_by_their_token(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    dead = died_while_creating(cluster, store, plan)
    assert dead.owned == {}

    second = start_launch(plan, pod="launcher-2")
    finish_all(cluster, plan.name)
    assert second.wait() is None
    assert sum("adopted" in line for line in second.lines) == 2
    eventually(lambda: cluster.held() == [], "everything is given back")
    assert all(attempt.closed for attempt in attempts(store))


def test_cleanup_finds_them_too_and_touches_nothing_else(
    cluster: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    plan, other = (
        make_test_plan(namespace=cluster.namespace),
        make_test_plan(namespace=cluster.namespace, spec=b"other"),
    )
    died_while_creating(cluster, store, plan)
    # same labels, other name, in no journal
    cluster.kubelet.request(
        "POST",
        f"/api/v1/namespaces/{cluster.namespace}/services",
        service_manifest(other, intent="0" * 32, owner=None),
    )
    would = clean_up(store, lambda _: cluster.api(), "demo", dry_run=True)
    assert [item.kind for item in would.removed] == ["Job", "Service"]
    assert len(cluster.jobs()) == 1

    report = clean_up(store, lambda _: cluster.api(), "demo")
    assert [item.uid for item in report.removed] == [item.uid for item in would.removed]
    eventually(lambda: cluster.held() == [f"Service {other.name}"], "only the foreign Service is left")
    again = clean_up(store, lambda _: cluster.api(), "demo")
    assert (again.removed, again.closed, again.attempts) == ([], 1, 1)


def test_an_object_that_took_the_name_afterwards_is_not_deleted(
    cluster: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    died_while_creating(cluster, store, plan, kinds=("Service",))
    path = f"/api/v1/namespaces/{cluster.namespace}/services"
    cluster.kubelet.request("DELETE", f"{path}/{plan.name}")
    cluster.kubelet.request("POST", path, service_manifest(plan, intent="0" * 32, owner=None))
    assert clean_up(store, lambda _: cluster.api(), "demo").removed == []
    assert cluster.held() == [f"Service {plan.name}"]


def test_the_reaper_deletes_what_other_stages_left_and_spares_the_running(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore
) -> None:
    cluster.kubelet.add_nodes(6)
    dead = make_test_plan(namespace=cluster.namespace, stage="sample")
    died_while_creating(cluster, store, dead, pod="dead")
    cluster.kubelet.set_phase("dead", "Failed")
    running = make_test_plan(namespace=cluster.namespace, stage="capture_prefix")
    beside = start_launch(running, pod="beside")
    run_all(cluster, running.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in beside.lines), "it runs")

    plan = make_test_plan(namespace=cluster.namespace)
    launched = start_launch(plan)
    finish_all(cluster, plan.name)
    assert launched.wait() is None
    assert any(f"Job {dead.name} of sample was left behind: deleted" in line for line in beside.lines)
    assert not any("left behind" in line for line in launched.lines)
    assert {job["metadata"]["name"] for job in cluster.jobs() if not job["metadata"].get("deletionTimestamp")} == {
        running.name
    }
    for pod in cluster.kubelet.pods(running.name):
        cluster.kubelet.succeed(pod, IMAGE_ID)
    assert beside.wait() is None


def test_of_two_launchers_the_later_has_the_job_and_the_earlier_ends_without_touching_it(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    first = start_launch(plan)
    pods = run_all(cluster, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in first.lines), "the first runs")
    second = start_launch(plan, pod="launcher-2")
    error = first.wait()
    assert "a later attempt" in str(error)
    (job,) = cluster.jobs()
    assert "deletionTimestamp" not in job["metadata"]
    for pod in pods:
        cluster.kubelet.succeed(pod, IMAGE_ID)
    assert second.wait() is None
    eventually(lambda: cluster.held() == [], "everything is given back")


def died_while_creating(
    cluster: Cluster,
    store: FileStore,
    plan: PlacementPlan,
    *,
    kinds: tuple[str, ...] = ("Service", "Job"),
    pod: str = "launcher",
) -> Attempt:
    """What a launcher leaves that dies between the server's answer and the journal's record."""
    launcher = launcher_pod(cluster, pod)
    attempt = open_attempt(
        store,
        run=plan.run,
        transaction=plan.transaction,
        stage=plan.stage,
        plan=plan.digest,
        namespace=plan.namespace,
        name=plan.name,
        launcher=launcher,
    )
    api: ClusterApi = cluster.api()
    for kind in kinds:
        build = job_manifest if kind == "Job" else service_manifest
        api.create(kind, build(plan, intent=attempt.intent.token, owner=Owner(launcher.name, launcher.uid)))  # type: ignore[arg-type]
    cluster.kubelet.set_phase(pod, "Failed")
    return attempt

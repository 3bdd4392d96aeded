"""An unlucky or hostile cluster: overload, expired tokens, nonsense, two launchers at once, foreign journals."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kubernetes import client

from longstraw_core.artifacts import FileStore
from longstraw_core.cli.main import main
from longstraw_core.cluster import launch as launch_module
from longstraw_core.cluster.api import ClusterApi, Exists, Missing, NotSignedIn, Unreachable, make_client
from longstraw_core.cluster.cleanup import clean_up
from longstraw_core.cluster.heartbeat import Heart, Watchdog
from longstraw_core.cluster.journal import Attempt, Owned, attempt_places, open_attempt, read_attempts
from longstraw_core.cluster.manifests import service_manifest
from longstraw_core.cluster.ownership import Superseded
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.cluster.task_config import PodSettings
from longstraw_core.spec import SpecError
from longstraw_core.spec.exit_codes import INTEGRITY
from tests.cluster.conftest import IMAGE_ID, QUICK_TIMES, Launched, launch_in_thread
from tests.cluster.test_launch import finish_all, run_all
from tests.cluster.test_restarts import died_while_creating
from tests.servers.kubernetes_api.cluster import QUICK, Cluster
from tests.servers.kubernetes_api.http_server import LAUNCHER
from tests.servers.kubernetes_api.kubelet import eventually

Plan = Callable[..., PlacementPlan]
Start = Callable[..., Launched]
IMPATIENT = replace(QUICK, outage_seconds=1.0, sign_in_seconds=1.0)


def test_an_overloaded_server_is_left_alone_for_as_long_as_it_asks(fake: Cluster, make_test_plan: Plan) -> None:
    assert fake.fake is not None
    fake.fake.refusals = [(429, 1), (503, 1)]
    started = time.monotonic()
    fake.api().create("Service", service_manifest(make_test_plan(), intent="0" * 32, owner=None))
    assert time.monotonic() - started >= 2.0
    assert fake.fake.refusals == []


def test_a_server_that_asks_for_more_time_than_there_is_is_given_up_at_once(fake: Cluster) -> None:
    assert fake.fake is not None
    fake.fake.refusals = [(429, 3600)]
    started = time.monotonic()
    with pytest.raises(Unreachable, match="429"):
        fake.api(IMPATIENT).get("Job", "x")
    assert time.monotonic() - started < 1.0


def test_an_overloaded_server_does_not_end_a_running_stage(
    fake: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    assert fake.fake is not None
    plan = make_test_plan()
    fake.kubelet.add_nodes(2)
    launched = launch_in_thread(fake, store, plan)
    pods = run_all(fake, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "pods run")
    fake.fake.refusals = [(429, 1)] * 3
    fake.proxy.drop()
    eventually(lambda: fake.fake is not None and fake.fake.refusals == [], "the refusals are used up")
    for pod in pods:
        fake.kubelet.succeed(pod, IMAGE_ID)
    assert launched.wait() is None


def test_a_token_that_expires_is_replaced_without_an_end_of_the_stage(
    fake: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    assert fake.fake is not None
    plan = make_test_plan()
    fake.kubelet.add_nodes(2)
    launched = launch_in_thread(fake, store, plan)
    pods = run_all(fake, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "pods run")
    fake.fake.tokens.clear()
    fake.proxy.drop()
    eventually(lambda: any("not allowed: Unauthorized" in line for line in launched.lines), "it is told so")
    fake.fake.tokens.add(LAUNCHER)
    for pod in pods:
        fake.kubelet.succeed(pod, IMAGE_ID)
    assert launched.wait() is None
    assert any("answers again" in line for line in launched.lines)


def test_a_token_that_stays_wrong_ends_the_stage_with_what_to_do(
    fake: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    assert fake.fake is not None
    fake.fake.tokens.clear()
    times = replace(QUICK_TIMES, patience=IMPATIENT)
    error = launch_in_thread(fake, store, make_test_plan(), times=times).wait()
    assert isinstance(error, NotSignedIn)
    assert "longstraw doctor" in str(error)


def test_a_token_that_no_header_carries_is_not_quoted(fake: Cluster) -> None:
    configuration = client.Configuration()
    configuration.host = fake.url
    configuration.api_key = {"authorization": "Bearer word-1\ninjected: x"}
    api = ClusterApi(make_client(configuration), fake.namespace, replace(QUICK, outage_seconds=0.0))
    with pytest.raises(Unreachable, match="the token cannot be sent") as refused:
        api.get("Job", "any")
    assert "word-1" not in str(refused.value)


def test_an_answer_that_is_none_does_not_leave_the_launcher_waiting_for_ever(
    fake: Cluster, make_test_plan: Plan, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway in front of the server answers 404 and events without a type; then the server is back."""
    plan = make_test_plan()
    fake.kubelet.add_nodes(2)
    nonsense: list[Callable[[], Any]] = []

    def missing() -> Any:
        raise Missing("404 page not found")

    listed, watched = ClusterApi.list_all, ClusterApi.watch
    monkeypatch.setattr(
        ClusterApi, "list_all", lambda self, *rest: nonsense.pop()() if nonsense else listed(self, *rest)
    )
    monkeypatch.setattr(ClusterApi, "watch", lambda self, *rest: nonsense.pop()() if nonsense else watched(self, *rest))
    launched = launch_in_thread(fake, store, plan)
    pods = run_all(fake, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "pods run")
    nonsense += [missing, lambda: iter([{"kind": "Status"}]), missing, lambda: iter([{"type": "ADDED", "object": {}}])]
    fake.proxy.drop()
    eventually(lambda: nonsense == [], "the nonsense is answered")
    for pod in pods:
        fake.kubelet.succeed(pod, IMAGE_ID)
    assert launched.wait() is None


def test_an_object_that_the_server_does_not_store_is_refused_at_once(fake: Cluster, make_test_plan: Plan) -> None:
    manifest = service_manifest(make_test_plan(), intent="0" * 32, owner=None)
    started = time.monotonic()
    for size, words in ((300 << 10, "Too long"), (2 << 20, "Too long"), (4 << 20, "too large")):
        manifest["metadata"]["annotations"]["x"] = "x" * size
        with pytest.raises(SpecError, match=words):
            fake.api().create("Service", manifest)
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(("count", "size", "words"), [(1, 200_000, "BIG_0"), (20, 60_000, "bytes")])
def test_an_environment_that_no_pod_can_have_is_refused_before_anything_is_created(
    count: int, size: int, words: str, make_test_plan: Plan
) -> None:
    env = tuple({"name": f"BIG_{number}", "value": "x" * size} for number in range(count))
    with pytest.raises(SpecError, match=words):
        make_test_plan(pod=PodSettings(env=env), nodes=1)


def test_a_launcher_that_has_the_later_number_knows_the_earlier_one_however_close_they_were(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    opened = launch_module.open_attempt

    def overtaken(*arguments: Any, **named: Any) -> Attempt:
        monkeypatch.setattr(launch_module, "open_attempt", opened)
        died_while_creating(cluster, store, plan, pod="quicker")
        return opened(*arguments, **named)

    monkeypatch.setattr(launch_module, "open_attempt", overtaken)
    launched = start_launch(plan)
    finish_all(cluster, plan.name)
    assert launched.wait() is None, launched.lines
    assert any("adopted" in line for line in launched.lines)
    eventually(lambda: cluster.held() == [], "everything is given back")
    assert all(attempt.closed and not attempt.live for attempt in read_attempts(store, "demo"))


def test_a_launcher_that_has_the_earlier_number_ends_when_the_later_one_was_quicker(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    opened = launch_module.open_attempt
    later: list[Launched] = []

    def slow(*arguments: Any, **named: Any) -> Attempt:
        monkeypatch.setattr(launch_module, "open_attempt", opened)
        attempt = opened(*arguments, **named)
        later.append(start_launch(plan, pod="later"))
        eventually(lambda: any("2 of 2 pods" in line for line in later[0].lines), "the later one runs")
        return attempt

    monkeypatch.setattr(launch_module, "open_attempt", slow)
    earlier = start_launch(plan)
    run_all(cluster, plan.name)
    assert isinstance(earlier.wait(), Superseded)
    (job,) = cluster.jobs()
    assert "deletionTimestamp" not in job["metadata"]
    for pod in cluster.kubelet.pods(plan.name):
        cluster.kubelet.succeed(pod, IMAGE_ID)
    assert later[0].wait() is None, later[0].lines
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_an_object_that_goes_while_it_is_adopted_is_created_again(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    died_while_creating(cluster, store, plan, kinds=("Service",), pod="first")
    adopt = ClusterApi.set_owners

    def gone(self: ClusterApi, kind: Any, found: dict[str, Any], *rest: Any) -> dict[str, Any]:
        monkeypatch.setattr(ClusterApi, "set_owners", adopt)
        path = f"/api/v1/namespaces/{cluster.namespace}/services/{plan.name}"
        cluster.kubelet.request("DELETE", path)
        return adopt(self, kind, found, *rest)

    monkeypatch.setattr(ClusterApi, "set_owners", gone)
    launched = start_launch(plan)
    finish_all(cluster, plan.name)
    assert launched.wait() is None
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_a_journal_that_was_closed_by_others_opens_again_when_its_launcher_goes_on(store: FileStore) -> None:
    attempt = open_attempt(
        store,
        run="demo",
        transaction=1,
        stage="train",
        plan="sha256:" + "0" * 64,
        namespace="team",
        name="ls-train-0123456789",
        launcher=None,
    )
    other = next(read_attempts(store, "demo"))
    launch_module.close_superseded(_NoObjects(), [other])  # type: ignore[arg-type]
    assert next(read_attempts(store, "demo")).closed
    attempt.append(Owned(object="Job", uid="j"))
    again = next(read_attempts(store, "demo"))
    assert (again.closed, again.live) == (False, {"j": "Job"})


class _NoObjects:
    """A cluster in which nothing is."""

    def get(self, *_: object, **__: object) -> None:
        return None


@pytest.mark.parametrize("half", ["0000-intent.json", "0001-owned.json"])
def test_cleanup_goes_on_past_a_journal_that_is_half_written(
    half: str, cluster: Cluster, make_test_plan: Plan, store: FileStore, tmp_path: Path
) -> None:
    torn = make_test_plan(namespace=cluster.namespace, stage="sample")
    died_while_creating(cluster, store, torn, pod="torn")
    whole = make_test_plan(namespace=cluster.namespace)
    died_while_creating(cluster, store, whole, pod="whole")
    (place,) = (place for place in attempt_places(store, "demo") if place.stage == "sample")
    path = store.root / f"{place.prefix}{half}"
    path.parent.chmod(0o755)
    path.unlink(missing_ok=True)
    path.write_bytes(b'{"kind":"inte')

    arguments = ["cleanup", "demo", "--store", store.uri, "-o", "json"]
    kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
    result = CliRunner().invoke(main, [*arguments, "--kubeconfig", str(kubeconfig)])
    assert result.exit_code == INTEGRITY
    assert half in result.stderr
    report = json.loads(result.stdout.splitlines()[0])
    assert {item["name"] for item in report["removed"]} == {whole.name}
    eventually(
        lambda: {line.split()[1] for line in cluster.held() if not line.startswith("Pod")} == {torn.name},
        "what nobody can say anything about is left alone",
    )


def test_a_journal_that_claims_a_foreign_object_deletes_nothing(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore, tmp_path: Path
) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "database", "namespace": cluster.namespace},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    }
    made = cluster.kubelet.request("POST", f"/api/v1/namespaces/{cluster.namespace}/services", foreign)
    attempt = open_attempt(
        store,
        run="demo",
        transaction=1,
        stage="sample",
        plan="sha256:" + "0" * 64,
        namespace=cluster.namespace,
        name="database",
        launcher=None,
    )
    attempt.append(Owned(object="Service", uid=made["metadata"]["uid"]))
    report = clean_up(store, lambda _: cluster.api(), "demo")
    assert (report.removed, len(report.foreign)) == ([], 1)
    kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
    shown = CliRunner().invoke(main, ["cleanup", "demo", "--store", store.uri, "--kubeconfig", str(kubeconfig)])
    assert "its labels are not that run's" in " ".join(shown.stdout.split())
    # neither does the reaper of the next stage
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    finish_all(cluster, plan.name)
    assert launched.wait() is None
    assert any("which is not this run's: left alone" in line for line in launched.lines)
    assert [item["metadata"]["name"] for item in cluster.services()] == ["database"]


def test_cleanup_while_the_run_lives_touches_nothing_of_it(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    pods = run_all(cluster, plan.name)
    before = cluster.held()
    report = clean_up(store, lambda _: cluster.api(), "demo")
    assert (report.removed, report.running) == ([], ["train of transaction 1"])
    assert cluster.held() == before
    for pod in pods:
        cluster.kubelet.succeed(pod, IMAGE_ID)
    assert launched.wait() is None


@pytest.mark.parametrize("hours", [-30, 30])
def test_clocks_that_disagree_do_not_matter_to_the_heartbeat(
    hours: int, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = "cluster/demo/0001/train/heartbeat/"
    heart = Heart(store, prefix, 1)
    monotonic = [0.0]
    watchdog = Watchdog(store, prefix, clock=lambda: monotonic[0])
    watchdog.look()
    for _ in range(5):
        monotonic[0] += 15.0
        heart.beat()
        monkeypatch.setattr(time, "time", lambda: 1e9 + hours * 3600.0)
        watchdog.look()
        assert watchdog.seconds_without_news() == 0.0
    monotonic[0] += 61.0
    watchdog.look()
    assert watchdog.seconds_without_news() == 61.0


@pytest.mark.parametrize(
    "run", ["A_Run.with-every_kind.of-sign", "x" * 128, "ends-with-a-dash-", "0", "a..b", "ends.with.a.dot."]
)
def test_any_name_of_a_run_gives_objects_that_the_server_takes(run: str, fake: Cluster, make_test_plan: Plan) -> None:
    from longstraw_core.cluster.manifests import job_manifest

    plan = make_test_plan().model_copy(update={"run": run})
    fake.api().create("Service", service_manifest(plan, intent="0" * 32, owner=None))
    fake.api().create("Job", job_manifest(plan, intent="0" * 32, owner=None))
    with pytest.raises(Exists):
        fake.api().create("Job", job_manifest(plan, intent="0" * 32, owner=None))


def test_a_lost_answer_to_a_creation_is_no_second_object(
    cluster: Cluster, make_test_plan: Plan, start_launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    once = ClusterApi._once
    lost = threading.Event()

    def answer_lost(self: ClusterApi, what: str, call: Any, **named: Any) -> Any:
        answer = once(self, what, call, **named)
        if what == f"creating Job {plan.name}" and not lost.is_set():
            lost.set()
            raise Unreachable("connection reset")
        return answer

    monkeypatch.setattr(ClusterApi, "_once", answer_lost)
    launched = start_launch(plan)
    finish_all(cluster, plan.name)
    assert launched.wait() is None
    assert lost.is_set()
    eventually(lambda: cluster.held() == [], "everything is given back")

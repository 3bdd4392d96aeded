"""Four layers that give the nodes back, each tested with the others out of the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from longstraw_core.artifacts import FileStore, open_store
from longstraw_core.artifacts.s3_store import S3Store
from longstraw_core.artifacts.store import Store
from longstraw_core.cluster import heartbeat
from longstraw_core.cluster.diagnosis import HEARTBEAT_LOST
from longstraw_core.cluster.heartbeat import Heart, Watchdog, latest_beat
from longstraw_core.cluster.placement import TTL_SECONDS, PlacementPlan
from longstraw_core.cluster.termination import Terminated
from longstraw_core.spec import LongStrawError, StageFailed
from longstraw_core.spec.exit_codes import TERMINATED
from tests.cluster.conftest import IMAGE_ID, SHORT_OUTAGE, Launched, LauncherProcess, launch_in_thread
from tests.cluster.test_launch import run_all
from tests.cluster.test_restarts import died_while_creating
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually
from tests.servers.seaweedfs import S3Server

Plan = Callable[..., PlacementPlan]
Start = Callable[..., Launched]
StartProcess = Callable[..., LauncherProcess]


def test_owner_reference_the_launchers_pod_takes_everything_with_it(
    cluster: Cluster, make_test_plan: Plan, start_process: StartProcess
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_process(plan)
    run_all(cluster, plan.name)
    launched.says("2 of 2 pods have started")
    launched.process.send_signal(signal.SIGKILL)
    launched.process.wait()
    assert len(cluster.jobs()) == 1
    cluster.kubelet.delete_pod(launched.pod.name)
    eventually(lambda: cluster.held() == [], "Job, Service and pods go with the launcher's pod")


def test_sigterm_the_job_is_deleted_before_the_process_ends(
    cluster: Cluster, make_test_plan: Plan, start_process: StartProcess
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_process(plan)
    run_all(cluster, plan.name)
    launched.says("2 of 2 pods have started")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait() == TERMINATED
    assert all(job["metadata"].get("deletionTimestamp") for job in cluster.jobs())
    eventually(lambda: cluster.held() == [], "everything is given back")


def test_sigterm_the_first_request_is_the_deletion_of_the_job(
    fake: Cluster, make_test_plan: Plan, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longstraw_core.cluster import launch as module

    plan = make_test_plan()
    fake.kubelet.add_nodes(2)
    assert fake.fake is not None
    # in a thread there are no signals: the exception that the handler raises is raised where the launcher waits
    marks: list[int] = []

    def terminated(*_: object) -> None:
        assert fake.fake is not None
        marks.append(len(fake.fake.requests))
        raise Terminated

    monkeypatch.setattr(module._Run, "_verdict", terminated)
    launched = launch_in_thread(fake, store, plan)
    assert isinstance(launched.wait(), Terminated)
    after = [item for item in fake.fake.requests[marks[0] :] if "watch" not in item[1] and item[0] != "GET"]
    assert after[0] == ("DELETE", f"/apis/batch/v1/namespaces/team/jobs/{plan.name}")


def test_deadline_the_job_ends_without_any_launcher(cluster: Cluster, make_test_plan: Plan, store: FileStore) -> None:
    plan = make_test_plan(namespace=cluster.namespace, deadline_seconds=2)
    cluster.kubelet.add_nodes(2)
    died_while_creating(cluster, store, plan)
    for pod in cluster.kubelet.wait_for_pods(plan.name, 2):
        cluster.kubelet.start(pod, IMAGE_ID)
    if cluster.fake is not None:
        cluster.fake.storage.pass_time(2)
    eventually(lambda: cluster.kubelet.pods(plan.name) == [], "the pods are ended")
    (job,) = cluster.jobs()
    assert "DeadlineExceeded" in {condition["reason"] for condition in job["status"]["conditions"]}


def test_deadline_the_launcher_says_so(cluster: Cluster, make_test_plan: Plan, start_launch: Start) -> None:
    plan = make_test_plan(namespace=cluster.namespace, deadline_seconds=2)
    cluster.kubelet.add_nodes(2)
    launched = start_launch(plan)
    run_all(cluster, plan.name)
    if cluster.fake is not None:
        cluster.fake.storage.pass_time(2)
    error = launched.wait()
    assert isinstance(error, StageFailed)
    assert "stopped after 2 s" in str(error)


def test_time_to_live_a_finished_job_and_its_service_go_by_themselves(
    fake: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    plan = make_test_plan()
    fake.kubelet.add_nodes(2)
    launched = launch_in_thread(fake, store, plan, times=SHORT_OUTAGE)
    pods = run_all(fake, plan.name)
    eventually(lambda: any("2 of 2 pods have started" in line for line in launched.lines), "pods run")
    fake.proxy.refuse()  # from here on the launcher can delete nothing
    assert launched.wait() is not None
    for pod in pods:
        fake.kubelet.succeed(pod, IMAGE_ID)
    assert fake.fake is not None
    assert len(fake.held()) == 4
    fake.fake.storage.pass_time(TTL_SECONDS)
    eventually(lambda: fake.held() == [], "Job, pods and Service are gone")


def test_heartbeat_the_times_add_up_to_less_than_promised() -> None:
    worst = heartbeat.STALE_AFTER_SECONDS + heartbeat.LOOK_SECONDS + heartbeat.STOP_GRACE_SECONDS
    assert worst <= heartbeat.PROMISED_SECONDS
    assert heartbeat.STALE_AFTER_SECONDS >= 3 * heartbeat.BEAT_SECONDS


@pytest.fixture(params=["file", "s3"])
def beat_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of each kind."""
    if request.param == "file":
        return FileStore(tmp_path / "beats", create=True)
    server: S3Server = request.getfixturevalue("seaweedfs_server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    store = S3Store(f"s3://artifacts/{tmp_path.name}", create=True)
    store.create_object("snapshots/" + "0" * 64 + ".json", b"{}", "application/json")
    return store


PREFIX = "cluster/demo/0001/train/heartbeat/"


def test_heartbeat_a_worker_ends_when_the_beats_stop(beat_store: Store, tmp_path: Path) -> None:
    heart = Heart(beat_store, PREFIX, 1, interval=0.3)
    heart.start()
    log = tmp_path / "termination-log"
    script = (
        "import sys, pathlib\n"
        "from longstraw_core.artifacts import open_store\n"
        "from longstraw_core.cluster.heartbeat import Watchdog\n"
        "from longstraw_core.stages.node import supervise\n"
        "watchdog = Watchdog(open_store(sys.argv[1]), sys.argv[2], interval=0.2)\n"
        "watchdog.start()\n"
        "worker = [sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        ' print("works", flush=True); time.sleep(600)\']\n'
        "log = pathlib.Path(sys.argv[3])\n"
        "sys.exit(supervise(worker, watchdog, stale_after=3.0, grace=0.5, look=0.2, termination_log=log))\n"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", script, beat_store.uri, PREFIX, str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert node.stdout is not None
        assert "works" in node.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            node.wait(timeout=5.0)  # longer than `stale_after`: it lives as long as the launcher does
        heart.stop()
        stopped = time.monotonic()
        assert node.wait(timeout=60.0) == HEARTBEAT_LOST
        assert time.monotonic() - stopped >= 2.0
        assert '"error": "Retryable"' in log.read_text()
    finally:
        node.kill()
        node.wait()


def test_heartbeat_beats_of_a_launcher_that_is_long_gone_are_no_news(store: FileStore) -> None:
    heart = Heart(store, PREFIX, 1)
    heart.beat()
    now = [100.0]
    watchdog = Watchdog(store, PREFIX, clock=lambda: now[0])
    now[0] += 50.0
    watchdog.look()
    assert watchdog.seconds_without_news() == 50.0
    heart.beat()
    watchdog.look()
    assert watchdog.seconds_without_news() == 0.0
    now[0] += 7.0
    watchdog.look()
    assert watchdog.seconds_without_news() == 7.0


def test_heartbeat_a_store_that_cannot_be_read_counts_as_no_heartbeat(tmp_path: Path) -> None:
    gone = FileStore(tmp_path / "gone", create=True)
    now = [0.0]
    watchdog = Watchdog(gone, PREFIX, clock=lambda: now[0])
    for path in (tmp_path / "gone").iterdir():
        path.rmdir()
    (tmp_path / "gone").rmdir()
    now[0] = 61.0
    with suppress(LongStrawError):
        watchdog.look()
    assert watchdog.seconds_without_news() == 61.0


def test_heartbeat_only_the_latest_few_beats_are_kept(beat_store: Store) -> None:
    heart = Heart(beat_store, PREFIX, 1)
    for _ in range(10):
        heart.beat()
    assert latest_beat(beat_store, PREFIX) == 10
    assert len(beat_store.list_names(PREFIX)) == 3
    assert open_store(beat_store.uri).list_names(PREFIX) == beat_store.list_names(PREFIX)


def test_heartbeat_a_superseded_launcher_learns_it_from_the_beats(store: FileStore) -> None:
    first, second = Heart(store, PREFIX, 1), Heart(store, PREFIX, 2)
    first.beat()
    second._next = latest_beat(store, PREFIX) + 1
    second.beat()
    first.beat()
    assert first.superseded.is_set()
    second.beat()
    assert not second.superseded.is_set()

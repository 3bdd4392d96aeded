"""Every pair of faults: whatever happens, in whichever order, no node stays held and nothing foreign is touched."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from longstraw_core.artifacts import FileStore
from longstraw_core.cluster.cleanup import clean_up
from longstraw_core.cluster.journal import read_attempts
from longstraw_core.cluster.manifests import service_manifest
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.spec.exit_codes import INTEGRITY, NUMERIC, RETRYABLE, USAGE
from tests.cluster.conftest import IMAGE_ID, LauncherProcess
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually

Plan = Callable[..., PlacementPlan]
StartProcess = Callable[..., LauncherProcess]

POD_FAULTS = {
    "pod evicted": RETRYABLE,
    "rank crash": NUMERIC,
    "image pull error": USAGE,
    "never schedulable": RETRYABLE,
    "quota": RETRYABLE,
    "wrong digest": INTEGRITY,
}
"""What happens to a pod, and with which status the launcher ends when nothing else happens."""
LAUNCHER_FAULTS = ("launcher killed", "launcher terminated", "API server unreachable")
FAULTS = (*POD_FAULTS, *LAUNCHER_FAULTS)
FROM_THE_START = ("never schedulable", "quota")
"""Faults of the cluster that are there before the launch."""
PAIRS = [
    *itertools.combinations(FAULTS, 2),
    # a pod's fault that comes when the launcher is no longer there, or cut off
    *itertools.product(LAUNCHER_FAULTS, [fault for fault in POD_FAULTS if fault not in FROM_THE_START]),
]


@dataclass
class Scene:
    """One launch to which faults happen."""

    cluster: Cluster
    plan: PlacementPlan
    launched: LauncherProcess
    statuses: set[int] = field(default_factory=set)
    """Statuses that the launcher may end with."""
    pods_hit: int = 0
    """Pods to which something was done."""

    def happen(self, fault: str) -> None:
        kubelet = self.cluster.kubelet
        if fault == "launcher killed":
            self.launched.process.send_signal(signal.SIGKILL)
            self.launched.process.wait()
            self.statuses.add(-signal.SIGKILL)
        elif fault == "launcher terminated":
            self.launched.process.send_signal(signal.SIGTERM)
            self.statuses.add(143)
        elif fault == "API server unreachable":
            self.cluster.proxy.refuse()
            self.statuses.add(RETRYABLE)
        else:
            if self.statuses != {-signal.SIGKILL}:  # a launcher that was killed ends in no other way
                self.statuses.add(POD_FAULTS[fault])
            for pod in kubelet.pods(self.plan.name)[-1:]:
                with contextlib.suppress(LookupError):  # the fault before has taken the pod away already
                    self._to_pod(fault, pod)
                    self.pods_hit += fault not in FROM_THE_START

    def _to_pod(self, fault: str, pod: dict) -> None:
        kubelet = self.cluster.kubelet
        if fault == "pod evicted":
            kubelet.evict(pod, IMAGE_ID)
        elif fault == "rank crash":
            kubelet.crash(pod, IMAGE_ID, NUMERIC)
        elif fault == "image pull error":
            kubelet.cannot_pull(pod, "InvalidImageName")
        elif fault == "wrong digest":
            kubelet.start(pod, "registry.example/other@sha256:" + "cd" * 32)


@pytest.mark.parametrize(
    "faults",
    [(fault,) for fault in FAULTS] + PAIRS,
    ids=lambda faults: " and ".join(faults),
)
def test_no_node_stays_held(
    faults: tuple[str, ...], cluster: Cluster, make_test_plan: Plan, start_process: StartProcess, store: FileStore
) -> None:
    if "quota" in faults:
        cluster.create_quota(pods=2)  # the launcher and one worker
    cluster.kubelet.add_nodes(1 if "never schedulable" in faults else 2)
    foreign = make_test_plan(namespace=cluster.namespace, spec=b"foreign")
    services = f"/api/v1/namespaces/{cluster.namespace}/services"
    cluster.kubelet.request("POST", services, service_manifest(foreign, intent="0" * 32, owner=None))
    plan = make_test_plan(namespace=cluster.namespace, scheduling_seconds=3)

    launched = start_process(plan)
    launched.says("Job " + plan.name + " created")
    cluster.kubelet.wait_for_pods(plan.name, 1 if {"quota", "never schedulable"} & set(faults) else 2)
    scene = Scene(cluster, plan, launched)
    for fault in faults:
        scene.happen(fault)
        if fault == faults[0] and fault in POD_FAULTS and fault not in FROM_THE_START:
            assert scene.pods_hit == 1
    status = launched.wait()
    assert status in scene.statuses, launched.lines

    # what a person or the next attempt finds: the launcher's pod has ended, the API server is back
    cluster.proxy.refusing = False
    cluster.kubelet.set_phase(launched.pod.name, "Failed")
    attempts = list(read_attempts(store, "demo"))
    if any(not attempt.closed for attempt in attempts):
        assert {"launcher killed", "API server unreachable", "launcher terminated"} & set(faults)
        clean_up(store, lambda _: cluster.api(), "demo")
    eventually(lambda: cluster.held() == [f"Service {foreign.name}"], "only what is not ours is left")
    assert all(attempt.closed and not attempt.live for attempt in read_attempts(store, "demo"))


def test_the_faults_are_the_ones_that_were_asked_for() -> None:
    assert len({frozenset(pair) for pair in PAIRS}) == 36
    assert len(set(PAIRS)) == len(PAIRS) == 36 + 3 * 4


def test_an_unreachable_server_leaves_the_workers_to_the_heartbeat(
    cluster: Cluster, make_test_plan: Plan, start_process: StartProcess, store: FileStore
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    cluster.kubelet.add_nodes(2)
    launched = start_process(plan)
    launched.says("created")
    launched.says("Job")
    cluster.kubelet.wait_for_pods(plan.name, 2)
    cluster.proxy.refuse()
    assert launched.wait() == RETRYABLE
    assert any("not deleted" in line and "longstraw cleanup demo" in line for line in launched.lines)
    beats = store.list_names(f"{plan.prefix}heartbeat/")
    waited = threading.Event().wait(1.5)  # three intervals of the test's heartbeat
    assert not waited
    assert store.list_names(f"{plan.prefix}heartbeat/") == beats != []

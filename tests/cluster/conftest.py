"""A stage to launch, a store to journal in, and a cluster that is the fake, and the real server where it is at hand."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from longstraw_core.artifacts import FileStore
from longstraw_core.cluster.journal import LauncherPod
from longstraw_core.cluster.launch import LaunchTimes, launch
from longstraw_core.cluster.placement import Placement, PlacementPlan, make_plan
from longstraw_core.cluster.task_config import PodSettings
from longstraw_core.spec import sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON
from tests.servers.kubernetes_api.cluster import QUICK, Cluster, fake_cluster
from tests.servers.kubernetes_api.http_server import LAUNCHER
from tests.servers.kubernetes_api.kubelet import GPU, eventually
from tests.servers.kubernetes_api.real import (
    API_BINARIES,
    ASSETS_VARIABLE,
    CONTROLLER_BINARIES,
    ControlPlane,
    assets_directory,
    control_plane,
    real_cluster,
    require_binaries,
)

DIGEST = "sha256:" + "ab" * 32
IMAGE = f"registry.example/longstraw/trainer@{DIGEST}"
IMAGE_ID = f"docker-pullable://{IMAGE}"
QUICK_TIMES = LaunchTimes(patience=QUICK, heartbeat=0.5, image=2.0, progress=1.0, log_end=2.0, gone=15.0, tick=0.2)
SHORT_OUTAGE = replace(QUICK_TIMES, patience=replace(QUICK, outage_seconds=2.0, rollback_seconds=1.0))
"""A launcher that gives up on the API server soon."""


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """The real servers, started once."""
    with control_plane() as running:
        yield running


@pytest.fixture(params=["fake", "real"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An empty namespace with no nodes, and controllers and a scheduler."""
    yield from _cluster(request, API_BINARIES + CONTROLLER_BINARIES)


@pytest.fixture(params=["fake", "real"])
def api_server(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An empty namespace for what the API server does alone."""
    yield from _cluster(request, API_BINARIES)


def _cluster(request: pytest.FixtureRequest, binaries: tuple[str, ...]) -> Iterator[Cluster]:
    if request.param == "fake":
        with fake_cluster() as found:
            yield found
        return
    assets = assets_directory()
    if assets is None:
        pytest.skip(f"real kube-apiserver: {ASSETS_VARIABLE} is not set")
    require_binaries(assets, binaries)  # never skipped where somebody asked for it
    with real_cluster(request.getfixturevalue("plane")) as found:
        yield found


@pytest.fixture
def fake() -> Iterator[Cluster]:
    """The fake alone, for what the real server cannot be made to do."""
    with fake_cluster() as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """An empty store."""
    return FileStore(tmp_path / "store", create=True)


@pytest.fixture
def make_test_plan(store: FileStore) -> Callable[..., PlacementPlan]:
    """Build the plan of `train` on two nodes with eight accelerators each."""

    def make(
        *,
        namespace: str = "team",
        spec: bytes = b"spec",
        stage: str = "train",
        pod: PodSettings | None = None,
        **placement: object,
    ) -> PlacementPlan:
        content = b'{"stage":"train"}'
        request = store.create_object(
            f"cluster/demo/0001/{stage}/request-{sha256_digest(content)[7:]}.json", content, MEDIA_TYPE_JSON
        )
        return make_plan(
            namespace=namespace,
            store=store.uri,
            run="demo",
            transaction=1,
            stage=stage,  # type: ignore[arg-type]
            spec_digest=sha256_digest(spec),
            image=IMAGE,
            request=request,
            placement=Placement(**{"nodes": 2, "processes_per_node": 8, "scheduling_seconds": 60, **placement}),  # type: ignore[arg-type]
            pod=pod
            or PodSettings(
                resources={"limits": {GPU: "8", "memory": "64Gi"}, "requests": {GPU: "8", "cpu": "8"}},
                volumes=({"name": "store", "hostPath": {"path": store.root.as_posix()}},),
                volume_mounts=({"name": "store", "mountPath": store.root.as_posix()},),
            ),
        )

    return make


@dataclass
class Launched:
    """A launcher in a thread, and what it said."""

    lines: list[str] = field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float = 60.0) -> BaseException | None:
        assert self.done.wait(seconds), f"the launcher does not end; it said {self.lines}"
        return self.error


def launch_in_thread(
    cluster: Cluster, store: FileStore, plan: PlacementPlan, *, times: LaunchTimes = QUICK_TIMES, pod: str = "launcher"
) -> Launched:
    """Launch a plan in a thread, from a new pod of the cluster."""
    launched = Launched()
    launcher = launcher_pod(cluster, pod)

    def run() -> None:
        try:
            api = cluster.api(times.patience)
            launch(plan, store=store, api=api, launcher=launcher, say=launched.lines.append, times=times)
        except BaseException as error:
            launched.error = error
        finally:
            launched.done.set()

    threading.Thread(target=run, daemon=True).start()
    return launched


@pytest.fixture
def start_launch(store: FileStore, cluster: Cluster) -> Callable[..., Launched]:
    """Launch a plan in the test's cluster."""
    return lambda plan, **arguments: launch_in_thread(cluster, store, plan, **arguments)


def launcher_pod(cluster: Cluster, name: str) -> LauncherPod:
    """A running pod for a launcher to be in."""
    created = cluster.kubelet.create_pod(name, "registry.example/longstraw/control:1")
    cluster.kubelet.set_phase(name, "Running")
    return LauncherPod(name=name, uid=created["metadata"]["uid"])


@dataclass
class LauncherProcess:
    """A launcher that can be killed, and the lines it printed."""

    process: "subprocess.Popen[str]"
    pod: LauncherPod
    lines: list[str] = field(default_factory=list)

    def says(self, text: str) -> None:
        """Wait until a line contains the text."""
        eventually(lambda: any(text in line for line in self.lines), f"the launcher says {text!r}: {self.lines}")

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture
def start_process(store: FileStore, cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., LauncherProcess]]:
    """Launch a plan in a process of its own, from a pod of the cluster."""
    started: list[LauncherProcess] = []

    def start(plan: PlacementPlan, *, pod: str = "launcher") -> LauncherProcess:
        launcher = launcher_pod(cluster, pod)
        arguments = tmp_path / f"{pod}.json"
        arguments.write_text(
            json.dumps(
                {
                    "url": cluster.launcher_url,
                    "token": LAUNCHER,
                    "certificate": None if cluster.certificate is None else str(cluster.certificate),
                    "plan": plan.model_dump_json(),
                    "store": store.uri,
                    "launcher": launcher.to_json_object(),
                }
            )
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.launcher_process", str(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        launched = LauncherProcess(process, launcher)

        def read() -> None:
            for line in process.stdout or ():
                launched.lines.append(line.rstrip())

        threading.Thread(target=read, daemon=True).start()
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()

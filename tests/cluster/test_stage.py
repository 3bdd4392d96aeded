"""A real stage through the launcher: the pod is played by a process that runs what its template says."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from longstraw_core.artifacts import read_receipt
from longstraw_core.cluster.placement import Placement
from longstraw_core.cluster.task_config import PodSettings
from longstraw_core.spec import DataRefused, IntegrityError, SpecError, TransactionSpec
from longstraw_core.stages.execute import StageOutcome, StageRequest, run_stage
from longstraw_core.stages.launcher import launch_settings, launch_stage, placement_plan
from tests.cluster.conftest import DIGEST, IMAGE, QUICK_TIMES, launcher_pod
from tests.cluster.pod_processes import PodProcesses
from tests.servers.kubernetes_api.cluster import Cluster


@pytest.fixture
def prepared(spec_fields: dict[str, Any]) -> TransactionSpec:
    """A specification whose first two stages have run in this process."""
    spec = TransactionSpec.model_validate(spec_fields)
    for stage in ("audit_data", "export_lora"):
        run_stage(StageRequest(stage=stage, spec=spec, run="small", transaction=1))
    return spec


@pytest.fixture
def pod_settings_of_test(tmp_path: Path) -> PodSettings:
    """A volume where the store is."""
    return PodSettings(
        volumes=({"name": "work", "hostPath": {"path": tmp_path.as_posix()}},),
        volume_mounts=({"name": "work", "mountPath": tmp_path.as_posix()},),
    )


def launched(
    cluster: Cluster,
    spec: TransactionSpec,
    pod: PodSettings,
    lines: list[str],
    *,
    image_variable: str = IMAGE,
    tmp_path: Path,
) -> tuple[Callable[[], StageOutcome], PodProcesses, str]:
    request = StageRequest(stage="capture_prefix", spec=spec, run="small", transaction=1)
    placement = Placement(nodes=1)
    plan = placement_plan(request, namespace=cluster.namespace, image=IMAGE, placement=placement, pod=pod)
    cluster.kubelet.add_nodes(1)
    processes = PodProcesses(cluster, tmp_path, image_variable=image_variable)
    launcher = launcher_pod(cluster, "launcher")

    def go() -> StageOutcome:
        return launch_stage(
            request,
            image=IMAGE,
            placement=placement,
            pod=pod,
            api=cluster.api(),
            launcher=launcher,
            say=lines.append,
            times=QUICK_TIMES,
        )

    return go, processes, plan.name


def test_a_stage_in_a_pod_of_its_own_returns_its_receipt(
    cluster: Cluster, prepared: TransactionSpec, pod_settings_of_test: PodSettings, tmp_path: Path
) -> None:
    lines: list[str] = []
    go, processes, name = launched(cluster, prepared, pod_settings_of_test, lines, tmp_path=tmp_path)
    processes.play(name, 1)
    outcome = go()
    assert not outcome.reused or outcome.receipt.predicate.stage == "capture_prefix"
    predicate = read_receipt(outcome.store, outcome.descriptor).predicate
    assert (predicate.stage, predicate.image_digest, predicate.run) == ("capture_prefix", DIGEST, "small")
    assert any(line.startswith("rank 0 | longstraw small/1 capture_prefix: stage_finished") for line in lines), lines
    # a second launch reuses the receipt and creates nothing
    assert cluster.fake is None or not cluster.fake.requests.clear()
    again = go()
    assert again.descriptor == outcome.descriptor
    assert cluster.fake is None or cluster.fake.requests == []


def test_the_error_of_the_stage_is_the_error_of_the_launch(
    cluster: Cluster, prepared: TransactionSpec, pod_settings_of_test: PodSettings, tmp_path: Path
) -> None:
    lines: list[str] = []
    go, processes, name = launched(cluster, prepared, pod_settings_of_test, lines, tmp_path=tmp_path)
    weights = next(Path(prepared.model.snapshot).glob("*.safetensors"))
    content = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        processes.play(name, 1)
        with pytest.raises(IntegrityError, match=r"rank of node 0.*safetensors"):
            go()  # the stage's own words, through the termination message
    finally:
        weights.write_bytes(content)
    assert any("stage_failed" in line for line in lines)


def test_a_receipt_of_another_image_is_refused(
    cluster: Cluster, prepared: TransactionSpec, pod_settings_of_test: PodSettings, tmp_path: Path
) -> None:
    other = f"registry.example/other@sha256:{'cd' * 32}"
    go, processes, name = launched(cluster, prepared, pod_settings_of_test, [], tmp_path=tmp_path, image_variable=other)
    processes.play(name, 1)
    with pytest.raises(IntegrityError, match="expected image"):
        go()


def test_a_killed_worker_process_is_a_failed_stage_and_leaves_no_process(
    cluster: Cluster, prepared: TransactionSpec, pod_settings_of_test: PodSettings, tmp_path: Path
) -> None:
    go, processes, name = launched(cluster, prepared, pod_settings_of_test, [], tmp_path=tmp_path)
    processes.play(name, 1)

    def kill_when_started() -> None:
        while not processes.processes:
            threading.Event().wait(0.05)
        processes.processes[0].send_signal(signal.SIGTERM)

    threading.Thread(target=kill_when_started, daemon=True).start()
    with pytest.raises(Exception, match="status"):
        go()
    assert processes.processes[0].wait(timeout=30) != 0


def test_the_arguments_of_a_component_say_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {
        "placement": Placement(nodes=4, queue="gpu").model_dump_json(),
        "accelerator": "nvidia.com/gpu",
        "pull_secret": "registry",
        "task_config": dsl.TaskConfig(resources={"limits": {"nvidia.com/gpu": "8"}}),
    }
    with pytest.raises(SpecError, match="LONGSTRAW_WORKER_IMAGE"):
        launch_settings(arguments)
    monkeypatch.setenv("LONGSTRAW_WORKER_IMAGE", IMAGE)
    settings = launch_settings(arguments)
    assert settings is not None
    assert (settings.image, settings.placement.nodes, settings.accelerators) == (IMAGE, 4, 8)
    assert (settings.placement.queue, settings.placement.pull_secrets) == ("gpu", ("registry",))
    assert settings.pod.resources["requests"] == {"nvidia.com/gpu": "8"}
    with pytest.raises(SpecError, match="placement: nodes"):
        launch_settings({**arguments, "placement": '{"nodes": 0}'})


def test_without_a_cluster_the_same_component_runs_the_stage_here() -> None:
    assert launch_settings({"placement": "{}", "task_config": dsl.TaskConfig()}) is None
    assert launch_settings({"spec": "{}"}) is None


def test_a_request_before_its_upstream_stages_is_refused_before_anything_is_created(
    cluster: Cluster, spec_fields: dict[str, Any], pod_settings_of_test: PodSettings, tmp_path: Path
) -> None:
    spec = TransactionSpec.model_validate(spec_fields)
    run_stage(StageRequest(stage="audit_data", spec=spec, run="small", transaction=1))
    go, _, _ = launched(cluster, spec, pod_settings_of_test, [], tmp_path=tmp_path)
    with pytest.raises((SpecError, DataRefused), match="export_lora"):
        go()
    assert cluster.held() == []

"""Stages on two nodes through the launcher: two pods played by processes over loopback, against one process."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from longstraw_core.artifacts import find_receipt, open_store
from longstraw_core.cluster.placement import Placement
from longstraw_core.cluster.task_config import PodSettings
from longstraw_core.spec import SpecError, StageFailed, TransactionSpec
from longstraw_core.spec.rank_sessions import RankSessions, check_agreement
from longstraw_core.spec.receipts import ReceiptPredicate
from longstraw_core.stages.execute import StageOutcome, StageRequest, run_stage
from longstraw_core.stages.launcher import launch_stage, placement_plan
from tests.cluster.conftest import DIGEST, IMAGE, QUICK_TIMES, launcher_pod
from tests.cluster.pod_processes import PodProcesses
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually
from tests.servers.ports import free_port
from tests.stages.scripted import group_rollouts, make_spec, prompts_of, publish_rollouts, run
from tests.support.sglang.cpu import fake_environment
from tests.support.sglang.oracle import SERVED


@pytest.fixture
def one_prompt(spec_fields: dict[str, Any]) -> dict[str, Any]:
    spec_fields["data"]["prompts_per_transaction"] = 1
    return spec_fields


@pytest.fixture
def pods(cluster: Cluster, tmp_path: Path) -> Iterator[PodProcesses]:
    """Two nodes, and the processes that play their pods."""
    cluster.kubelet.add_nodes(2)
    played = PodProcesses(cluster, tmp_path)
    yield played
    played.end()


@pytest.fixture
def mounted(tmp_path: Path) -> PodSettings:
    """A volume where the store is."""
    return PodSettings(
        volumes=({"name": "work", "hostPath": {"path": tmp_path.as_posix()}},),
        volume_mounts=({"name": "work", "mountPath": tmp_path.as_posix()},),
    )


def prepared(spec: TransactionSpec, run: str) -> StageRequest:
    for stage in ("audit_data", "export_lora"):
        run_stage(StageRequest(stage=stage, spec=spec, run=run, transaction=1))
    return StageRequest(stage="capture_prefix", spec=spec, run=run, transaction=1)


def on_two_nodes(
    cluster: Cluster,
    pods: PodProcesses,
    request: StageRequest,
    pod: PodSettings,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> StageOutcome:
    placement = Placement(nodes=2)
    plan = placement_plan(request, namespace=cluster.namespace, image=IMAGE, placement=placement, pod=pod)
    assert plan.placement.processes_per_node == 1
    pods.play(plan.name, 2)
    return launch_stage(
        request,
        image=IMAGE,
        placement=placement,
        pod=pod,
        api=cluster.api(),
        launcher=launcher_pod(cluster, "launcher"),
        say=say,
        times=QUICK_TIMES,
    )


def computed(predicate: ReceiptPredicate) -> dict[str, Any]:
    """What a receipt says of the result, without what depends on time, the run's name and the image."""
    shown = predicate.to_json_object()
    kept = ("spec_digest", "source_digest", "context_parallel", "expert_parallel", "metrics", "status", "facts", "seed")
    return {name: shown[name] for name in kept} | {
        "outputs": {name: output["digest"] for name, output in shown["outputs"].items()},
        "ranks": [(rank["rank"], rank["device"]) for rank in shown["ranks"]],
    }


def test_a_stage_on_two_nodes_gives_the_receipt_of_one_machine_and_node_0_alone_writes_it(
    cluster: Cluster, pods: PodProcesses, one_prompt: dict[str, Any], mounted: PodSettings
) -> None:
    spec = make_spec(one_prompt, "layout.context_parallel=2")
    here = run_stage(prepared(spec, "here")).receipt.predicate
    outcome = on_two_nodes(cluster, pods, prepared(spec, "nodes"), mounted)
    predicate = outcome.receipt.predicate
    assert computed(predicate) == computed(here)
    assert predicate.image_digest == DIGEST
    assert [rank.rank for rank in predicate.ranks] == [0, 1]
    finished = {index: [line for line in lines if "stage_finished" in line] for index, lines in pods.lines.items()}
    assert (len(finished[0]), finished[1]) == (1, [])
    assert any("ranks_ended" in line for line in pods.lines[1])
    assert cluster.held() == []


def scored(fields: dict[str, Any], run_name: str, *, until: str) -> TransactionSpec:
    """A specification whose run is finished up to a stage, on one machine with one rank."""
    spec = make_spec(fields, "layout.context_parallel=2", f"name={run_name}")
    prepared(spec, run_name)
    (prompt,) = prompts_of(spec)
    answers = [f"Answer: {prompt.ground_truth}"] * 2 + ["Answer: 0"] * 2
    publish_rollouts(spec, group_rollouts(prompt, answers))
    stages = ("score_rewards", "capture_prefix", "old_logprobs")
    for stage in stages[: stages.index(until) + 1]:
        ranks = None if stage == "score_rewards" else 1
        run_stage(StageRequest(stage=stage, spec=spec, run=run_name, transaction=1, context_parallel=ranks))
    return spec


def test_old_probabilities_on_two_nodes_are_those_of_one_machine(
    cluster: Cluster, pods: PodProcesses, one_prompt: dict[str, Any], mounted: PodSettings
) -> None:
    here = run(scored(one_prompt, "here", until="capture_prefix"), "old_logprobs").receipt.predicate
    spec = scored(one_prompt, "nodes", until="capture_prefix")
    request = StageRequest(stage="old_logprobs", spec=spec, run="nodes", transaction=1)
    predicate = on_two_nodes(cluster, pods, request, mounted).receipt.predicate
    assert predicate.outputs["logprobs"].digest == here.outputs["logprobs"].digest
    assert predicate.metrics == here.metrics
    assert predicate.image_digest == DIGEST
    assert [rank.rank for rank in predicate.ranks] == [0, 1]
    assert not any("stage_finished" in line for line in pods.lines[1])
    assert any("ranks_ended" in line for line in pods.lines[1])


def test_an_update_on_two_nodes_gives_the_checkpoint_of_one_machine(
    cluster: Cluster, pods: PodProcesses, one_prompt: dict[str, Any], mounted: PodSettings
) -> None:
    here = run(scored(one_prompt, "here", until="old_logprobs"), "train").receipt.predicate
    spec = scored(one_prompt, "nodes", until="old_logprobs")
    request = StageRequest(stage="train", spec=spec, run="nodes", transaction=1)
    predicate = on_two_nodes(cluster, pods, request, mounted).receipt.predicate
    assert predicate.outputs["checkpoint"].digest == here.outputs["checkpoint"].digest
    assert predicate.metrics == here.metrics
    sessions = RankSessions.model_validate_json(
        open_store(request.spec.storage.uri).get_bytes(predicate.outputs["rank_sessions"])
    )
    check_agreement(sessions)
    assert len(sessions.sessions) == 2
    assert not any("stage_finished" in line for line in pods.lines[1])


def test_a_rank_that_dies_on_the_other_node_is_the_error_of_the_launch(
    cluster: Cluster, pods: PodProcesses, one_prompt: dict[str, Any], mounted: PodSettings
) -> None:
    spec = make_spec(one_prompt, "layout.context_parallel=2")
    request = prepared(spec, "dies")

    def kill_when_joined() -> None:
        def rank() -> psutil.Process | None:
            if 1 not in pods.processes or not any("tokens captured" in line for line in pods.lines.get(0, [])):
                return None
            found = psutil.Process(pods.processes[1].pid).children(recursive=True)
            return next((one for one in found if "rank_process" in " ".join(one.cmdline())), None)

        eventually(lambda: rank() is not None, "rank 1 computes")
        os.kill(rank().pid, signal.SIGKILL)  # type: ignore[union-attr]

    threading.Thread(target=kill_when_joined, daemon=True).start()
    lines: list[str] = []
    with pytest.raises(StageFailed, match=r"rank of node 1.*rank 1 of 2 on .*died in phase .*SIGKILL"):
        on_two_nodes(cluster, pods, request, mounted, say=lines.append)
    assert any("rank 1 of 2 on" in line and "SIGKILL" in line for line in lines), lines
    assert find_receipt(open_store(spec.storage.uri), "dies", 1, "capture_prefix") is None
    assert cluster.held() == []


def test_a_server_on_two_nodes_samples_what_one_machine_samples(
    cluster: Cluster,
    pods: PodProcesses,
    spec_fields: dict[str, Any],
    mounted: PodSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_environment(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.05")
    spec_fields["lora"]["targets"] = list(SERVED)
    spec_fields["sampling"] |= {
        "engine": "sglang",
        "server": {
            "context_length": 1024,
            "start_timeout_seconds": 60.0,
            "nodes": 2,
            "tensor_parallel": 2,
            "port": free_port(),
            "rendezvous_port": free_port(),
        },
    }
    spec = make_spec(spec_fields)
    prepared(spec, "here")
    here = run_stage(StageRequest(stage="sample", spec=spec, run="here", transaction=1)).receipt.predicate
    prepared(spec, "nodes")
    outcome = on_two_nodes(cluster, pods, StageRequest(stage="sample", spec=spec, run="nodes", transaction=1), mounted)
    predicate = outcome.receipt.predicate
    assert predicate.outputs["rollouts"].digest == here.outputs["rollouts"].digest
    assert predicate.metrics == here.metrics
    assert any("leader_gone" in line for line in pods.lines[1])
    assert not any("stage_finished" in line for line in pods.lines[1])


def refused(spec: TransactionSpec, stage: str, nodes: int, accelerators: int = 0) -> str:
    with pytest.raises(SpecError) as caught:
        placement_plan(
            StageRequest(stage=stage, spec=spec, run="small", transaction=1),
            namespace="team",
            image=IMAGE,
            placement=Placement(nodes=nodes),
            pod=PodSettings(),
            accelerators=accelerators,
        )
    return str(caught.value)


def test_numbers_that_do_not_match_are_refused(spec_fields: dict[str, Any]) -> None:
    eight = make_spec(spec_fields, "layout.context_parallel=8")
    assert "train.nodes: 3: layout.context_parallel is 8, which cannot be dealt evenly" in refused(eight, "train", 3)
    assert "8 is 4 ranks per pod, and a pod has 8 accelerators" in refused(eight, "train", 2, 8)
    assert "8 is 4 ranks per pod, and a pod has 1 accelerator;" in refused(eight, "old_logprobs", 2, 1)
    assert "transformers samples in one pod" in refused(eight, "sample", 2)
    server = {"engine": "sglang", "server": {"nodes": 2, "tensor_parallel": 4, "context_length": 1024}}
    spec_fields["lora"]["targets"] = list(SERVED)
    served = make_spec(spec_fields | {"sampling": spec_fields["sampling"] | server})
    assert "sample.nodes: 4: sampling.server.nodes is 2; give both the same number" in refused(served, "sample", 4)
    assert "has 2 ranks per pod" in refused(served, "sample", 2, 1)


@pytest.mark.parametrize("number", ["", "one", "-1"])
def test_a_worker_that_is_not_told_its_number_does_not_start(
    number: str, monkeypatch: pytest.MonkeyPatch, spec_fields: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    from longstraw_core.artifacts.store import open_store as opened
    from longstraw_core.stages import worker
    from longstraw_core.stages.work_request import WorkRequest, store_request

    spec = make_spec(spec_fields)
    request = prepared(spec, "told")
    stored = store_request(opened(spec.storage.uri), WorkRequest.of("capture_prefix", request))
    monkeypatch.setenv("LONGSTRAW_STORE", spec.storage.uri)
    monkeypatch.setenv("LONGSTRAW_REQUEST", json.dumps(stored.to_json_object()))
    monkeypatch.setenv("LONGSTRAW_NODE_RANK", number)
    assert worker.main() == 2
    assert "LONGSTRAW_NODE_RANK" in capfd.readouterr().err

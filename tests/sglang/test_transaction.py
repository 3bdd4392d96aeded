"""Two whole transactions of a multimodal snapshot, sampled by the real server, which is killed once in the second."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from longstraw_core.artifacts import open_store, verify_store
from longstraw_core.rollout import sglang_server
from longstraw_core.rollout.process_session import session_processes
from longstraw_core.rollout.server_command import ServedPolicy
from longstraw_core.rollout.sglang_server import SglangServer
from longstraw_core.spec import Rollout, StageFailed, TransactionSpec
from longstraw_core.spec.transaction import ServerSpec
from longstraw_core.stages.events import EventLog
from longstraw_core.stages.execute import StageOutcome
from tests.stages.scripted import AFTER_SAMPLE, make_spec, run
from tests.support.processes import descendants, still_living
from tests.support.sglang.cpu import ARGUMENTS, HYBRID_ARGUMENTS, LORA_ARGUMENTS, SMALL
from tests.support.sglang.oracle import SERVED


@pytest.fixture
def spec(
    spec_fields: dict[str, Any], multimodal_snapshot: Path, cpu_environment: pytest.MonkeyPatch
) -> TransactionSpec:
    spec_fields["model"]["snapshot"] = str(multimodal_snapshot)
    spec_fields["lora"]["targets"] = list(SERVED)
    spec_fields["optimizer"]["learning_rate"] = 0.05
    spec_fields["reward"] = {"kind": "python", "function": "tests.support.sglang.reward:even_length"}
    spec_fields["sampling"] = {
        "engine": "sglang",
        "group_size": 4,
        "max_response_tokens": 6,
        "concurrent_requests": 2,
        "faithfulness": {"mean_limit": 1e-4, "max_limit": 1e-4},
        "server": {
            "arguments": [*ARGUMENTS, *HYBRID_ARGUMENTS, *LORA_ARGUMENTS],
            "context_length": 1024,
            **SMALL,
        },
    }
    spec_fields["objective"] = {"mask_truncated": False}
    return make_spec(spec_fields)


def finish(spec: TransactionSpec, transaction: int) -> dict[str, StageOutcome]:
    return {stage: run(spec, stage, transaction) for stage in AFTER_SAMPLE}


def test_two_transactions_and_a_server_that_is_killed_in_between(
    spec: TransactionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[SglangServer] = []
    honest_start = sglang_server.SglangServer.start

    def recorded_start(server: SglangServer) -> None:
        servers.append(server)
        honest_start(server)

    monkeypatch.setattr(sglang_server.SglangServer, "start", recorded_start)
    for stage in ("audit_data", "export_lora", "sample"):
        run(spec, stage)
    first = finish(spec, 1)
    assert first["train"].receipt.predicate.status == "stepped"

    for stage in ("audit_data", "export_lora"):
        run(spec, stage, 2)
    honest_progress = EventLog.progress
    started: list[psutil.Process] = []

    def kill_after_the_first_group(log: EventLog, phase: str, done: int, total: int) -> None:
        honest_progress(log, phase, done, total)
        if phase == "responses sampled" and done == 5:
            started.extend(descendants())
            os.kill(servers[-1]._ranks[0].session, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "progress", kill_after_the_first_group)
        with pytest.raises(StageFailed, match=r"SGLang rank 0 ended \(exit code -9\) while sampling.*whole log: blobs"):
            run(spec, "sample", 2)
    assert len(started) >= 4  # launcher, scheduler, detokenizer, guard
    assert not still_living(started)
    sampled = run(spec, "sample", 2)
    assert sampled.receipt.predicate.metrics["sampling/groups_resumed"] == 1
    assert sampled.receipt.predicate.facts["sampling_server"] == "sglang 0.5.23"
    second = finish(spec, 2)
    metrics = second["old_logprobs"].receipt.predicate.metrics
    assert metrics["faithfulness/responses"] == 8
    assert 0 < metrics["faithfulness/max"] < 1e-4
    assert second["train"].receipt.predicate.status == "stepped"
    store = open_store(spec.storage.uri)
    assert verify_store(store).faults == []
    assert not [name for name in store.list_names("runs/") if "finished" in name]
    content = store.get_bytes(sampled.receipt.predicate.outputs["rollouts"])
    rollouts = [Rollout.model_validate_json(line) for line in content.splitlines()]
    assert len({rollout.token_ids for rollout in rollouts}) == 8
    assert not any(session_processes(rank.session) for server in servers for rank in server._ranks)


def test_a_model_path_that_is_missing_is_in_the_message(tmp_path: Path, cpu_environment: pytest.MonkeyPatch) -> None:
    settings = ServerSpec(arguments=ARGUMENTS, **SMALL)
    server = SglangServer(
        ServedPolicy(tmp_path / "nowhere", None, "float32", 64),
        settings,
        seed=0,
        logs=tmp_path / "logs",
    )
    with pytest.raises(StageFailed, match=r"rank 0 ended \(exit code [0-9-]+\) while starting.*nowhere"):
        server.__enter__()
    assert not session_processes(server._ranks[0].session)

"""The stage `sample` with a server process: what it publishes, how it resumes, what it refuses before it starts one."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from longstraw_core.artifacts import open_store, verify_store
from longstraw_core.artifacts.finished_work import finished_name
from longstraw_core.spec import DataRefused, NumericError, Rollout, SpecError, StageFailed, TransactionSpec
from longstraw_core.stages.events import EventLog
from longstraw_core.stages.execute import StageOutcome
from longstraw_core.stages.preflight import check_before_start
from tests.servers.ports import free_port
from tests.support.processes import descendants, still_living
from tests.support.sglang.cpu import fake_environment
from tests.support.sglang.oracle import SERVED

from .scripted import make_spec, run


@pytest.fixture
def server_fields(spec_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The small specification, sampled by the stand-in server one response at a time."""
    fake_environment(monkeypatch)
    spec_fields["lora"]["targets"] = list(SERVED)
    spec_fields["data"]["prompts_per_transaction"] = 4
    spec_fields["sampling"] |= {
        "engine": "sglang",
        "concurrent_requests": 1,
        "server": {"context_length": 1024, "start_timeout_seconds": 60.0},
    }
    return spec_fields


def before(spec: TransactionSpec) -> None:
    run(spec, "audit_data")
    run(spec, "export_lora")


def rollouts_of(spec: TransactionSpec, outcome: StageOutcome) -> list[Rollout]:
    content = open_store(spec.storage.uri).get_bytes(outcome.receipt.predicate.outputs["rollouts"])
    return [Rollout.model_validate_json(line) for line in content.splitlines()]


def test_groups_log_and_counts_are_published(server_fields: dict[str, Any]) -> None:
    spec = make_spec(server_fields)
    before(spec)
    outcome = run(spec, "sample")
    predicate = outcome.receipt.predicate
    rollouts = rollouts_of(spec, outcome)
    assert [(rollout.prompt_id, rollout.index) for rollout in rollouts] == [
        (rollouts[4 * group].prompt_id, index) for group in range(4) for index in range(4)
    ]
    assert len({rollout.token_ids for rollout in rollouts}) == 16
    assert b"POST /generate" in open_store(spec.storage.uri).get_bytes(predicate.outputs["server_log"])
    assert predicate.facts == {"sampling_engine": "sglang", "sampling_server": "sglang 0.5.23"}
    assert predicate.metrics["sampling/responses"] == 16
    assert predicate.metrics["sampling/truncated"] == sum(rollout.truncated for rollout in rollouts)
    assert predicate.metrics["sampling/aborted"] == 0
    assert predicate.metrics["sampling/identical_groups"] == 0
    assert verify_store(open_store(spec.storage.uri)).faults == []


def test_a_stage_whose_server_died_goes_on_from_its_finished_groups(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = make_spec(server_fields, f"storage.uri={(tmp_path / 'whole').as_uri()}")
    before(whole)
    expected = rollouts_of(whole, run(whole, "sample"))
    spec = make_spec(server_fields)
    before(spec)
    monkeypatch.setenv("FAKE_SGLANG_DIE_AFTER", "11")  # the probe and ten responses: two whole groups
    with pytest.raises(StageFailed, match=r"told to die.*whole log: blobs/sha256/") as caught:
        run(spec, "sample")
    store = open_store(spec.storage.uri)
    log = str(caught.value).rpartition("whole log: ")[2]
    with store.open_object(log) as opened:
        assert b"told to die" in opened.stream.read()
    report = verify_store(store)
    assert report.faults == []
    assert finished_name("small", 1, "sample", 1) in report.unreferenced
    monkeypatch.delenv("FAKE_SGLANG_DIE_AFTER")
    outcome = run(spec, "sample")
    assert outcome.receipt.predicate.metrics["sampling/groups_resumed"] == 2
    assert rollouts_of(spec, outcome) == expected
    assert not [name for name in store.list_names("runs/") if "finished" in name]


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("die", r"rank 0 ended \(exit code -9\) while sampling; .*no weights for q_proj"),
        ("refuse", r"probe of one token: .*HTTP 400: the adapter cannot be loaded"),
    ],
)
def test_an_adapter_that_the_server_cannot_use_ends_the_stage_at_the_first_token(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, does: str, message: str
) -> None:
    server_fields["sampling"]["concurrent_requests"] = 16
    spec = make_spec(server_fields)
    before(spec)
    monkeypatch.setenv("FAKE_SGLANG_BAD_ADAPTER", does)
    with pytest.raises(StageFailed, match=message + ".*whole log: blobs/sha256/") as caught:
        run(spec, "sample")
    store = open_store(spec.storage.uri)
    with store.open_object(str(caught.value).rpartition("whole log: ")[2]) as opened:
        assert opened.stream.read().count(b"no weights for q_proj") == 1  # nothing was asked for after the probe
    assert not [name for name in store.list_names("runs/") if "sample" in name]


@pytest.mark.parametrize("ending", ["sampled", "server died", "interrupted"])
def test_nothing_that_the_stage_started_lives_when_it_ends(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    spec = make_spec(server_fields)
    before(spec)
    if ending == "server died":
        monkeypatch.setenv("FAKE_SGLANG_DIE_AFTER", "11")
    honest = EventLog.progress
    others = {process.pid for process in descendants()}  # servers and workers of other tests in this process
    started: dict[int, psutil.Process] = {}

    def look(log: EventLog, phase: str, done: int, total: int) -> None:
        honest(log, phase, done, total)
        if phase == "responses sampled":
            started.update((process.pid, process) for process in descendants() if process.pid not in others)
            if ending == "interrupted" and done == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(EventLog, "progress", look)
    expected = {"sampled": nullcontext(), "server died": pytest.raises(StageFailed)}
    with expected.get(ending, pytest.raises(KeyboardInterrupt)):
        run(spec, "sample")
    assert len(started) >= 3  # the server, a process of its own, and the guard
    assert not still_living(list(started.values()))


def test_groups_of_one_response_many_times_are_flagged(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(server_fields)
    before(spec)
    monkeypatch.setenv("FAKE_SGLANG_SEED", "5")
    predicate = run(spec, "sample").receipt.predicate
    assert predicate.metrics["sampling/identical_groups"] == 4
    assert predicate.metrics["sampling/repeated_responses"] == 12
    assert predicate.facts["identical_responses"].startswith("all responses of at least one group are the same")


def test_the_log_is_kept_when_the_servers_numbers_are_refused(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(server_fields)
    before(spec)
    monkeypatch.setenv("FAKE_SGLANG_LOGPROB", "nan")
    with pytest.raises(NumericError, match=r"log-prob of response token 0 is nan; whole log: blobs/sha256/") as caught:
        run(spec, "sample")
    with open_store(spec.storage.uri).open_object(str(caught.value).rpartition("whole log: ")[2]) as opened:
        assert b"POST /generate" in opened.stream.read()


def test_a_damaged_or_foreign_finished_group_is_sampled_again(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(server_fields)
    before(spec)
    monkeypatch.setenv("FAKE_SGLANG_DIE_AFTER", "11")
    with pytest.raises(StageFailed):
        run(spec, "sample")
    part = Path(spec.storage.uri.removeprefix("file://")) / finished_name("small", 1, "sample", 0)
    content = part.read_bytes()
    part.chmod(0o644)
    damaged = content.replace(b'"temperature":1', b'"temperature":1.5', 1)
    assert damaged != content
    part.write_bytes(damaged)
    monkeypatch.delenv("FAKE_SGLANG_DIE_AFTER")
    outcome = run(spec, "sample")
    assert outcome.receipt.predicate.metrics["sampling/groups_resumed"] == 1
    assert {rollout.temperature for rollout in rollouts_of(spec, outcome)} == {1.0}


def test_the_transformers_engine_resumes_too(spec_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from longstraw_core.rollout import transformers_sampler

    spec = make_spec(spec_fields)
    before(spec)
    honest = transformers_sampler.sample_group
    calls: list[str] = []

    def second_fails(model: Any, tokenizer: Any, prompt: Any, *arguments: Any, **options: Any) -> list[Rollout]:
        calls.append(prompt.prompt_id)
        if len(calls) == 2:
            raise StageFailed("out of memory")
        return honest(model, tokenizer, prompt, *arguments, **options)

    monkeypatch.setattr(transformers_sampler, "sample_group", second_fails)
    with pytest.raises(StageFailed, match="out of memory"):
        run(spec, "sample")
    outcome = run(spec, "sample")
    assert outcome.receipt.predicate.metrics["sampling/groups_resumed"] == 1
    assert len(calls) == 3
    assert calls[2] == calls[1]
    assert "server_log" not in outcome.receipt.predicate.outputs


def test_what_was_not_sampled_from_the_policy_is_not_trained(server_fields: dict[str, Any]) -> None:
    """The stand-in server has no model: its tokens are not the policy's."""
    spec = make_spec(server_fields, "sampling.faithfulness={share: 0.5}")
    before(spec)
    run(spec, "sample")
    run(spec, "capture_prefix")
    with pytest.raises(NumericError, match=r"mean \|Δ log-prob\| is .* of 8 responses, sampling\.faithfulness"):
        run(spec, "old_logprobs")
    assert not open_store(spec.storage.uri).exists("runs/small/0001/old_logprobs/receipt.json")


def test_a_merged_checkpoint_is_served_without_an_adapter(server_fields: dict[str, Any]) -> None:
    spec = make_spec(server_fields, "sampling.server.merge=true", "lora.targets=all")
    check_before_start(spec)
    before(spec)
    outcome = run(spec, "sample")
    log = open_store(spec.storage.uri).get_bytes(outcome.receipt.predicate.outputs["server_log"])
    assert b"never been loaded" not in log
    assert len(rollouts_of(spec, outcome)) == 16


def test_what_the_server_could_not_serve_is_refused_before_a_run_and_by_the_stage(
    server_fields: dict[str, Any],
) -> None:
    for override, message in (
        ("lora.targets=all", "all has in_proj_a, in_proj_b, which SGLang cannot serve"),
        ("lora.targets=[q_proj, in_proj_b]", r"in_proj_b; leave them out \(lora.targets: \[q_proj\]\)"),
    ):
        spec = make_spec(server_fields, override)
        with pytest.raises(SpecError, match=message):
            check_before_start(spec)
    spec = make_spec(server_fields, "lora.targets=all")
    run(spec, "audit_data")
    with pytest.raises(SpecError, match="in_proj_a, in_proj_b"):
        run(spec, "export_lora")
    with pytest.raises(SpecError, match="decided by the stage itself"):
        check_before_start(make_spec(server_fields, "sampling.server.arguments=[--port, '1']"))


def test_a_prompt_that_does_not_fit_is_refused_before_the_server_is_started(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSTRAW_SGLANG_PYTHON", "/bin/false")
    spec = make_spec(server_fields, "sampling.server.context_length=40")
    before(spec)
    with pytest.raises(DataRefused, match=r"exceed the 40 that the server is started for"):
        run(spec, "sample")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.gradient=response_adapter", "response_adapter samples with the adapter off on the prompt"),
        ("sampling.temperature=0.0", "sampling.temperature"),
        ("sampling.temperature=1.0e-7", "samples greedily"),
        ("sampling.server.nodes=3", "do not divide over 3 nodes"),
        ("sampling.engine=transformers", "server is only for engine sglang"),
        ("sampling.max_total_tokens=5", "must not be below max_response_tokens"),
        ("sampling.faithfulness.share=0.0", "sampling.faithfulness.share"),
        ("sampling.server.memory_fraction=1.0", "sampling.server.memory_fraction"),
    ],
)
def test_a_specification_that_cannot_be_sampled_is_refused(
    server_fields: dict[str, Any], override: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(json.loads(json.dumps(server_fields)), override)


def test_another_node_runs_its_rank_until_node_0_is_done(
    server_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    server_fields["sampling"]["server"] |= {
        "nodes": 2,
        "tensor_parallel": 2,
        "port": port,
        "rendezvous_port": free_port(),
    }
    path = tmp_path / "nodes.yaml"
    path.write_text(json.dumps(server_fields), encoding="utf-8")
    spec = make_spec(server_fields)
    before(spec)
    command = [sys.executable, "-m", "longstraw_core.cli", "sampler-node", str(path), "--rank", "1"]
    follower = subprocess.Popen([*command, "--leader", "127.0.0.1"], stderr=subprocess.PIPE, text=True)
    monkeypatch.setenv("LONGSTRAW_NODE_RANK", "0")
    monkeypatch.setenv("LONGSTRAW_NODE_LEADER", "127.0.0.1")
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.05")
    outcome = run(spec, "sample")
    assert len(rollouts_of(spec, outcome)) == 16
    _, errors = follower.communicate(timeout=120)
    assert follower.returncode == 0, errors
    assert "leader_gone" in errors
    refused = subprocess.run([*command[:-1], "2", "--leader", "h"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "has a rank from 1 to sampling.server.nodes - 1" in refused.stderr


def test_another_node_ends_when_the_stage_ended_without_its_server(
    server_fields: dict[str, Any], tmp_path: Path
) -> None:
    server_fields["sampling"]["server"] |= {"nodes": 2, "tensor_parallel": 2, "start_timeout_seconds": 600.0}
    path = tmp_path / "nodes.yaml"
    path.write_text(json.dumps(server_fields), encoding="utf-8")
    spec = make_spec(server_fields)
    before(spec)
    command = [sys.executable, "-m", "longstraw_core.cli", "sampler-node", str(path), "--rank", "1"]
    command += ["--leader", "127.0.0.2"]  # nobody answers there, as when node 0 has nothing left to sample
    waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    run(spec, "sample")
    late = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    _, errors = waiting.communicate(timeout=300)
    assert (waiting.returncode, late.returncode) == (0, 0), errors + late.stderr
    assert "already_finished" in late.stderr

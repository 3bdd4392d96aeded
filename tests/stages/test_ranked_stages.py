"""Stages on ranks: what they publish, another number of ranks in every stage, and nothing published on failure."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longstraw_core.artifacts import find_receipt, open_store, read_manifest, verify_store
from longstraw_core.cli.main import main
from longstraw_core.spec import SpecError, TransactionSpec, canonical_json
from longstraw_core.spec.rank_sessions import RankSessions, check_agreement
from longstraw_core.stages.execute import StageOutcome
from tests.stages.scripted import (
    BEFORE_SAMPLE,
    group_rollouts,
    make_spec,
    prompts_of,
    publish_rollouts,
    run,
    run_transaction,
)


@pytest.fixture
def one_prompt(spec_fields: dict[str, Any]) -> dict[str, Any]:
    spec_fields["data"]["prompts_per_transaction"] = 1
    return spec_fields


def prepare(spec: Any) -> None:
    for stage in BEFORE_SAMPLE:
        run(spec, stage)
    (prompt,) = prompts_of(spec)
    answers = [f"Answer: {prompt.ground_truth}"] * 2 + ["Answer: 0"] * 2
    publish_rollouts(spec, group_rollouts(prompt, answers))
    run(spec, "score_rewards")


def command(spec: TransactionSpec, directory: Path, stage: str, *options: str) -> StageOutcome:
    """Run a stage as a user does, and return what it left."""
    written = directory / "transaction.yaml"
    written.write_bytes(canonical_json(spec))
    result = CliRunner().invoke(main, ["stage", stage, str(written), "-o", "json", *options])
    assert result.exit_code == 0, result.output
    return run(spec, stage)


def test_a_transaction_whose_stages_run_on_two_one_and_two_ranks_equals_one_process(
    one_prompt: dict[str, Any], tmp_path: Any
) -> None:
    alone = run_transaction(make_spec(one_prompt))["train"].receipt.predicate
    spec = make_spec(
        one_prompt | {"storage": {"uri": (tmp_path / "other").as_uri()}},
        "layout.context_parallel=2",
        "layout.base_weights=sharded",
    )
    prepare(spec)
    captured = run(spec, "capture_prefix")
    logprobs = command(spec, tmp_path, "old_logprobs", "--nproc", "1")
    trained = run(spec, "train")
    run(spec, "manifest_checkpoint")
    validated = run(spec, "validate_run")

    store = open_store(spec.storage.uri)
    paths = [entry.path for entry in read_manifest(store, captured.receipt.predicate.outputs["prefix"]).entries]
    assert "0000/policy/rank-00001-of-00002/layer-00000.safetensors" in paths
    assert [outcome.receipt.predicate.context_parallel for outcome in (captured, logprobs, trained)] == [2, 1, 2]
    predicate = trained.receipt.predicate
    assert [record.rank for record in predicate.ranks] == [0, 1]
    assert {phase.name for phase in predicate.ranks[1].phases} >= {"restore", "replay", "reverse_sweep"}
    for name in ("grad_norm", "sampling/sampling_logp_difference/mean"):
        assert predicate.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4)
    sessions = RankSessions.model_validate_json(store.get_bytes(predicate.outputs["rank_sessions"]))
    check_agreement(sessions)
    expected = ("load", "restore", "replay", "reverse_sweep", "finalise", "optimizer_step", "checkpoint", "release")
    assert [session.phases for session in sessions.sessions] == [expected, expected]
    assert all(session.witnesses for session in sessions.sessions)
    evidence = store.get_bytes(validated.receipt.predicate.outputs["evidence"]).decode()
    assert '"2 ranks"' in evidence
    assert verify_store(store).faults == []


def test_ranks_that_the_model_cannot_be_dealt_to_are_refused_and_nothing_is_published(
    one_prompt: dict[str, Any],
) -> None:
    spec = make_spec(one_prompt)
    prepare(spec)
    with pytest.raises(SpecError, match=r"rank \d of 3 on .*: .*context parallel size 3"):
        run(spec, "capture_prefix", ranks=3)
    assert find_receipt(open_store(spec.storage.uri), spec.name, 1, "capture_prefix") is None


def test_experts_that_do_not_fold_onto_the_ranks_are_refused(one_prompt: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="expert_parallel 2 does not divide context_parallel 3"):
        make_spec(one_prompt, "layout.context_parallel=3", "layout.expert_parallel=2")

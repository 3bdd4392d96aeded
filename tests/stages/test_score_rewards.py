"""The stage names its scorer in the receipt, publishes statistics, and refuses a missing plug-in before any work."""

import json
from typing import Any

import pytest

from longstraw_core.artifacts import open_store
from longstraw_core.rewards.statistics import ScoringReport
from longstraw_core.spec import ScoredGroup, SpecError, TransactionSpec
from longstraw_core.spec.receipts import ReceiptPredicate
from longstraw_core.stages.preflight import check_before_start

from .scripted import BEFORE_SAMPLE, group_rollouts, make_spec, prompts_of, publish_rollouts, run

PLUG_IN = "tests.rewards.plug_ins.sample:contains"


def scored(spec: TransactionSpec) -> ReceiptPredicate:
    for stage in BEFORE_SAMPLE:
        run(spec, stage)
    publish_rollouts(
        spec,
        [
            rollout
            for prompt in prompts_of(spec)
            for rollout in group_rollouts(
                prompt,
                [f"Answer: {prompt.ground_truth}", f"Answer: {prompt.ground_truth}.0", "Answer: 0", "lost\nhere"],
            )
        ],
    )
    return run(spec, "score_rewards").receipt.predicate


def groups_of(spec: TransactionSpec, predicate: ReceiptPredicate) -> list[ScoredGroup]:
    content = open_store(spec.storage.uri).get_bytes(predicate.outputs["scored_groups"])
    return [ScoredGroup.model_validate_json(line) for line in content.splitlines()]


@pytest.mark.parametrize(
    ("overrides", "name", "correct"),
    [
        (["reward.kind=dapo_math"], "dapo_math:label", [True, False, False, False]),
        (["reward.kind=dapo_math", "reward.variant=strict_box"], "dapo_math:strict_box", [False] * 4),
        (["reward.kind=math_verify"], "math_verify", [True, True, False, False]),
        (["reward.kind=python", f"reward.function={PLUG_IN}"], f"python:{PLUG_IN}", [True, True, False, False]),
    ],
)
def test_the_receipt_names_the_scorer_and_its_variant(
    spec_fields: dict[str, Any], overrides: list[str], name: str, correct: list[bool]
) -> None:
    spec = make_spec(spec_fields, *overrides)
    predicate = scored(spec)
    assert predicate.facts == {"reward": name}
    for group in groups_of(spec, predicate):
        assert [score.correct for score in group.scores] == correct
        assert all(score.rule.startswith(name) for score in group.scores)
    report = ScoringReport.model_validate_json(open_store(spec.storage.uri).get_bytes(predicate.outputs["statistics"]))
    assert report.reward == name
    assert len(report.groups) == 2
    assert predicate.metrics["scorers/compared"] == 8
    if "strict_box" not in name:
        assert predicate.metrics["scorers/disagreements"] == 2
        assert {found.index for found in report.agreement.disagreements} == {1}
        assert all(found.math_verify.correct for found in report.agreement.disagreements)


def test_a_missing_plug_in_is_refused_before_the_run(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields, "reward.kind=python", "reward.function=no.such:thing")
    with pytest.raises(SpecError, match="no module named no"):
        check_before_start(spec)
    with pytest.raises(SpecError, match="no module named no"):
        run(spec, "audit_data")


def test_the_audit_artifact_lists_every_finding(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    predicate = run(spec, "audit_data").receipt.predicate
    report = json.loads(open_store(spec.storage.uri).get_bytes(predicate.outputs["audit"]))
    assert {finding["kind"] for finding in report["findings"]} == {
        "duplicates",
        "conflicting_truths",
        "bad_truths",
        "too_long_prompts",
        "wrong_types",
        "control_characters",
    }
    assert predicate.metrics["data/dropped/duplicates"] == 0

"""The scoring report: figures per group, and every response on which the two math scorers disagree."""

from typing import Any

import pytest

from longstraw_core.rewards.groups import score_group
from longstraw_core.rewards.math_equality import MathScorer
from longstraw_core.rewards.scoring import DapoScorer
from longstraw_core.rewards.statistics import ScoringReport, scoring_report
from longstraw_core.spec import DataRefused
from longstraw_core.spec.transaction import RewardSpec

from .test_groups import PROMPT, rollout


def reported(*groups: tuple[str, ...], scorer: MathScorer, reward: RewardSpec | None = None) -> ScoringReport:
    reward = reward or RewardSpec()
    scored = [
        score_group(
            PROMPT, [rollout(index, text, index + 1) for index, text in enumerate(texts)], reward, normalize=True
        )
        for texts in groups
    ]
    return scoring_report([PROMPT], scored, "dapo_math:label", dapo=DapoScorer("label"), mathematical=scorer)


def test_figures_per_group_and_over_all(math_scorer: MathScorer) -> None:
    report = reported(
        ("Answer: 42", "Answer: 41", "none", "Answer: 42"), ("Answer: 1", "Answer: 2"), scorer=math_scorer
    )
    first, second = report.groups
    assert (first.solved_share, first.skipped, second.solved_share, second.skipped) == (0.5, False, 0.0, True)
    assert (report.responses, report.groups_skipped, report.solved_share) == (6, 1, pytest.approx(2 / 6))
    assert report.statuses == {"no_answer": 1, "ok": 5}
    assert report.rules == {"dapo_math:label": 6}
    assert (first.lengths.min, first.lengths.median, first.lengths.max) == (1, 2, 4)


def test_disagreements_are_listed_with_both_verdicts(math_scorer: MathScorer) -> None:
    report = reported(("Answer: 42", "Answer: 42.0", "Answer: 41", "Answer: 4, 2"), scorer=math_scorer)
    agreement = report.agreement
    assert (agreement.compared, agreement.agreed, agreement.share) == (4, 2, 0.5)
    refused, accepted = agreement.disagreements
    assert (refused.index, refused.dapo_math.correct, refused.math_verify.correct) == (1, False, True)
    assert (accepted.index, accepted.dapo_math.extracted, accepted.math_verify.rule) == (
        3,
        "42",
        "math_verify:several_values",
    )


def test_what_cannot_be_judged_is_not_counted_as_disagreement(math_scorer: MathScorer) -> None:
    agreement = reported(("Answer: 42", "Answer: $9^{9^{9^{9}}}$"), scorer=math_scorer).agreement
    assert (agreement.compared, agreement.not_compared) == (1, {"timeout": 1})


def test_truncated_responses_get_no_answer_when_the_specification_says_so() -> None:
    fields: dict[str, Any] = {"finish_reason": "length"}
    for truncated, expected in (("score", True), ("no_answer", False)):
        reward = RewardSpec(kind="math_verify", truncated=truncated)
        group = score_group(
            PROMPT, [rollout(0, "Answer: 42", **fields), rollout(1, "Answer: 42")], reward, normalize=True
        )
        assert [score.correct for score in group.scores] == [expected, True]
        assert group.scores[1].canonical == "42"
    assert group.scores[0].rule == "math_verify:truncated"


def test_a_report_of_nothing_is_refused(math_scorer: MathScorer) -> None:
    with pytest.raises(DataRefused, match="no scored groups"):
        reported(scorer=math_scorer)

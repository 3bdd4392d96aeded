"""Statistics of one transaction's groups for people: per group, over all, and where the two math scorers disagree."""

import math
from collections import Counter
from collections.abc import Sequence

from longstraw_core.rewards.scoring import Scorer
from longstraw_core.rewards.verdict import Verdict
from longstraw_core.spec import DataRefused, Prompt, ScoredGroup
from longstraw_core.spec.model import Count, FiniteFloat, StrictModel


class LengthDistribution(StrictModel):
    """Response lengths in tokens."""

    mean: FiniteFloat
    min: Count
    median: Count
    p90: Count
    max: Count


class GroupStatistics(StrictModel):
    """One prompt's responses."""

    prompt_id: str
    responses: Count
    reward_mean: FiniteFloat
    reward_std: FiniteFloat
    solved_share: FiniteFloat
    skipped: bool
    """All rewards are equal: the group carries no signal and is left out of the update."""
    lengths: LengthDistribution


class ScorerVerdict(StrictModel):
    """What one scorer says about one response."""

    correct: bool
    status: str
    extracted: str | None
    rule: str


class Disagreement(StrictModel):
    """A response that one math scorer accepts and the other does not."""

    prompt_id: str
    index: Count
    ground_truth: str
    dapo_math: ScorerVerdict
    math_verify: ScorerVerdict


class Agreement(StrictModel):
    """Both math scorers on the same rows. Rows that either cannot judge are counted, not compared."""

    compared: Count
    agreed: Count
    share: FiniteFloat | None
    """Agreed among compared; None when nothing could be compared."""
    not_compared: dict[str, Count]
    """Why rows were not compared: `bad_row` (either scorer refuses the ground truth) or `timeout`."""
    disagreements: tuple[Disagreement, ...]


class ScoringReport(StrictModel):
    """The artifact `statistics` of `score_rewards`."""

    reward: str
    """Kind and variant of the scorer whose rewards are trained on."""
    responses: Count
    reward_mean: FiniteFloat
    solved_share: FiniteFloat
    groups_skipped: Count
    statuses: dict[str, Count]
    rules: dict[str, Count]
    """How often each rule decided."""
    lengths: LengthDistribution
    groups: tuple[GroupStatistics, ...]
    agreement: Agreement


def scoring_report(
    prompts: Sequence[Prompt], groups: Sequence[ScoredGroup], name: str, *, dapo: Scorer, mathematical: Scorer
) -> ScoringReport:
    """Summarise scored groups and compare both math scorers on their responses.

    Raises:
        DataRefused: there are no groups.
    """
    if not groups:
        raise DataRefused("there are no scored groups; score at least one prompt")
    scores = [score for group in groups for score in group.scores]
    return ScoringReport(
        reward=name,
        responses=len(scores),
        reward_mean=math.fsum(score.reward for score in scores) / len(scores),
        solved_share=sum(score.correct for score in scores) / len(scores),
        groups_skipped=sum(group.status == "no_signal" for group in groups),
        statuses=dict(sorted(Counter(score.status for score in scores).items())),
        rules=dict(sorted(Counter(score.rule for score in scores).items())),
        lengths=length_distribution([len(rollout.token_ids) for group in groups for rollout in group.rollouts]),
        groups=tuple(_group_statistics(group) for group in groups),
        agreement=_agreement(prompts, groups, dapo, mathematical),
    )


def length_distribution(lengths: Sequence[int]) -> LengthDistribution:
    """Summarise lengths; the median of an even number is the lower of the middle two."""
    ordered = sorted(lengths)
    return LengthDistribution(
        mean=sum(ordered) / len(ordered),
        min=ordered[0],
        median=ordered[(len(ordered) - 1) // 2],
        p90=ordered[min(len(ordered) - 1, (9 * len(ordered)) // 10)],
        max=ordered[-1],
    )


def _group_statistics(group: ScoredGroup) -> GroupStatistics:
    return GroupStatistics(
        prompt_id=group.prompt_id,
        responses=len(group.scores),
        reward_mean=group.reward_mean,
        reward_std=group.reward_std,
        solved_share=sum(score.correct for score in group.scores) / len(group.scores),
        skipped=group.status == "no_signal",
        lengths=length_distribution([len(rollout.token_ids) for rollout in group.rollouts]),
    )


def _agreement(
    prompts: Sequence[Prompt], groups: Sequence[ScoredGroup], dapo: Scorer, mathematical: Scorer
) -> Agreement:
    truths = {prompt.prompt_id: prompt.ground_truth for prompt in prompts}
    places = [(group.prompt_id, rollout.index) for group in groups for rollout in group.rollouts]
    pairs = [(rollout.text, truths[group.prompt_id]) for group in groups for rollout in group.rollouts]
    agreed = 0
    not_compared: Counter[str] = Counter()
    found: list[Disagreement] = []
    both = zip(dapo.judge(pairs), mathematical.judge(pairs), strict=True)
    for (prompt_id, index), (_, truth), (first, second) in zip(places, pairs, both, strict=True):
        unjudged = next((status for status in ("bad_row", "timeout") if status in (first.status, second.status)), None)
        if unjudged is not None:
            not_compared[unjudged] += 1
        elif first.correct == second.correct:
            agreed += 1
        else:
            found.append(
                Disagreement(
                    prompt_id=prompt_id,
                    index=index,
                    ground_truth=truth,
                    dapo_math=_scorer_verdict(first),
                    math_verify=_scorer_verdict(second),
                )
            )
    compared = agreed + len(found)
    return Agreement(
        compared=compared,
        agreed=agreed,
        share=agreed / compared if compared else None,
        not_compared=dict(sorted(not_compared.items())),
        disagreements=tuple(found),
    )


def _scorer_verdict(verdict: Verdict) -> ScorerVerdict:
    return ScorerVerdict(correct=verdict.correct, status=verdict.status, extracted=verdict.extracted, rule=verdict.rule)

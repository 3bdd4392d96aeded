"""Advantages and statistics of groups of responses, with TRL's formulas and metric names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longstraw_core.rewards.scoring import Scorer, score_rollouts
from longstraw_core.spec import DataRefused, Prompt, Rollout, ScoredGroup
from longstraw_core.spec.records import SignalStatus
from longstraw_core.spec.transaction import RewardSpec

STD_OFFSET = 1e-4
"""TRL adds this to the standard deviation before it divides."""


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group with the mean and unbiased standard deviation of its rewards."""

    advantages: tuple[float, ...]
    mean: float
    std: float
    status: SignalStatus


def group_advantages(rewards: Sequence[float | None], *, normalize: bool, prompt_id: str) -> GroupAdvantages:
    """Compute GRPO advantages: (r − mean) / (std + 1e-4), or r − mean when `normalize` is off.

    A group whose rewards are all equal, also a group of one, carries no signal: its advantages are exactly 0.

    Raises:
        DataRefused: there is no reward at all, or one is missing or not finite; it never counts as 0.
    """
    if not rewards:
        raise DataRefused(f"prompt {prompt_id}: the group has no responses; sample it again")
    known: list[float] = []
    for index, reward in enumerate(rewards):
        if reward is None or not math.isfinite(reward):
            shown = "is missing" if reward is None else f"is {reward}"
            raise DataRefused(f"prompt {prompt_id}: reward of response {index} {shown}; score the group again")
        known.append(reward)
    if min(known) == max(known):
        return GroupAdvantages(advantages=(0.0,) * len(known), mean=known[0], std=0.0, status="no_signal")
    mean = math.fsum(known) / len(known)
    centred = [reward - mean for reward in known]
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(known) - 1))
    scale = std + STD_OFFSET if normalize else 1.0
    return GroupAdvantages(advantages=tuple(value / scale for value in centred), mean=mean, std=std, status="signal")


def score_group(
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    reward: RewardSpec,
    *,
    normalize: bool,
    scorer: Scorer | None = None,
) -> ScoredGroup:
    """Score all responses to one prompt and attach their advantages; `scorer` spares starting one for every group.

    Raises:
        DataRefused: no responses, a position missing or repeated, a response of another prompt, an unusable
            ground truth or a missing reward.
    """
    positions = [rollout.index for rollout in rollouts]
    if not rollouts or positions != list(range(len(rollouts))):
        raise DataRefused(
            f"prompt {prompt.prompt_id}: responses have positions {positions[:16]}, "
            f"expected 0 to {max(len(rollouts) - 1, 0)} in order; sample the group again"
        )
    scores = score_rollouts(prompt, rollouts, reward, scorer)
    result = group_advantages([score.reward for score in scores], normalize=normalize, prompt_id=prompt.prompt_id)
    return ScoredGroup(
        prompt_id=prompt.prompt_id,
        rollouts=tuple(rollouts),
        scores=scores,
        advantages=result.advantages,
        status=result.status,
        reward_mean=result.mean,
        reward_std=result.std,
    )


def group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Summarise the groups of one transaction.

    Names that TRL also logs (`reward`, `reward_std`, `frac_reward_zero_std`, `completions/*`) mean what they mean
    there; in particular, terminated lengths are 0 when every response was truncated. The others are:
    `groups/count`; `groups/skipped`, groups without a signal; `groups/solved`, groups with at least one correct
    response; `responses/correct_share`, `responses/no_answer_share` and `responses/timeout_share`.
    """
    if not groups:
        raise DataRefused("there are no scored groups; score at least one prompt")
    scores = [score for group in groups for score in group.scores]
    lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    terminated = [len(rollout.token_ids) for group in groups for rollout in group.rollouts if not rollout.truncated]
    statuses = [score.status for score in scores]
    return {
        "reward": _mean([score.reward for score in scores]),
        "reward_std": _mean([group.reward_std for group in groups]),
        "frac_reward_zero_std": _mean([float(group.reward_std == 0.0) for group in groups]),
        **_length_metrics(lengths, "length"),
        **_length_metrics(terminated or [0], "terminated_length"),
        "completions/clipped_ratio": 1.0 - len(terminated) / len(lengths),
        "groups/count": float(len(groups)),
        "groups/skipped": float(sum(group.status == "no_signal" for group in groups)),
        "groups/solved": float(sum(any(score.correct for score in group.scores) for group in groups)),
        "responses/correct_share": _mean([float(score.correct) for score in scores]),
        "responses/no_answer_share": statuses.count("no_answer") / len(scores),
        "responses/timeout_share": statuses.count("timeout") / len(scores),
    }


def _length_metrics(lengths: Sequence[int], name: str) -> dict[str, float]:
    return {
        f"completions/mean_{name}": _mean([float(length) for length in lengths]),
        f"completions/min_{name}": float(min(lengths)),
        f"completions/max_{name}": float(max(lengths)),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

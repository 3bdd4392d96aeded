"""Chooses the scorer that a specification names and turns its verdicts into scores; knows no group statistics."""

from collections.abc import Callable, Sequence

from longstraw_core.rewards import dapo_math
from longstraw_core.rewards.overlong import overlong_penalty
from longstraw_core.rewards.verdict import Verdict
from longstraw_core.spec import DataRefused, Prompt, Rollout, Score
from longstraw_core.spec.transaction import RewardSpec


def score_rollouts(prompt: Prompt, rollouts: Sequence[Rollout], reward: RewardSpec) -> tuple[Score, ...]:
    """Score the responses to `prompt`, in order.

    Raises:
        DataRefused: the ground truth cannot be compared with anything, or a rollout answers another prompt.
    """
    for rollout in rollouts:
        if rollout.prompt_id != prompt.prompt_id or rollout.prompt_token_ids != prompt.token_ids:
            raise DataRefused(
                f"rollout {rollout.prompt_id}[{rollout.index}] was not sampled from prompt {prompt.prompt_id}; "
                "sample this transaction again"
            )
    verdicts = judge_responses([rollout.text for rollout in rollouts], prompt.ground_truth, reward)
    scores: list[Score] = []
    for rollout, verdict in zip(rollouts, verdicts, strict=True):
        if verdict.status == "bad_row":
            problem = truth_check(reward)(prompt.ground_truth)
            raise DataRefused(
                f"prompt {prompt.prompt_id} (data row {prompt.row}): "
                f"ground truth {prompt.ground_truth[:80]!r} {problem}; "
                "correct reward_model.ground_truth in the data file"
            )
        penalty = _penalty(len(rollout.token_ids), reward)
        scores.append(
            Score(
                index=rollout.index,
                reward=verdict.reward + penalty,
                correct=verdict.correct,
                status=verdict.status,
                extracted=verdict.extracted,
                rule=verdict.rule,
                penalty=penalty,
            )
        )
    return tuple(scores)


def judge_responses(responses: Sequence[str], ground_truth: str, reward: RewardSpec) -> tuple[Verdict, ...]:
    """Return the verdict of the scorer `reward.kind` on each response, in order, without penalties."""
    return tuple(dapo_math.score_response(response, ground_truth, reward.variant) for response in responses)


def truth_check(reward: RewardSpec) -> Callable[[str], str | None]:
    """Return the function that says why the scorer cannot use a ground truth (None: it can)."""
    return lambda ground_truth: dapo_math.truth_problem(ground_truth, reward.variant)


def _penalty(tokens: int, reward: RewardSpec) -> float:
    if reward.overlong_max_tokens is None or reward.overlong_cache_tokens is None:
        return 0.0
    return overlong_penalty(tokens, max_tokens=reward.overlong_max_tokens, cache_tokens=reward.overlong_cache_tokens)

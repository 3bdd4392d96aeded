"""Chooses the scorer that a specification names and turns its verdicts into scores; knows no group statistics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

from longstraw_core.rewards import dapo_math
from longstraw_core.rewards.math_equality import MathScorer
from longstraw_core.rewards.overlong import overlong_penalty
from longstraw_core.rewards.plug_in import PlugInScorer
from longstraw_core.rewards.verdict import Verdict
from longstraw_core.spec import DataRefused, Prompt, Rollout, Score
from longstraw_core.spec.transaction import RewardSpec


class Scorer(Protocol):
    """What every kind of reward can do."""

    @property
    def name(self) -> str:
        """Kind and variant, for instance `dapo_math:label`."""
        ...

    def truth_problem(self, ground_truth: str) -> str | None:
        """Say why a ground truth cannot be compared with anything; None when it can."""
        ...

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return the verdict on every (response, ground truth), in order, without penalties."""
        ...


class DapoScorer:
    """The published rule; needs no workers, since every step of it is linear."""

    def __init__(self, variant: dapo_math.Variant) -> None:
        self._variant: dapo_math.Variant = variant

    @property
    def name(self) -> str:
        """The rule and its variant."""
        return f"dapo_math:{self._variant}"

    def truth_problem(self, ground_truth: str) -> str | None:
        """Say why a ground truth cannot be compared with anything; None when it can."""
        return dapo_math.truth_problem(ground_truth, self._variant)

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return the verdict on every (response, ground truth), in order."""
        return [dapo_math.score_response(response, truth, self._variant) for response, truth in pairs]


@contextmanager
def open_scorer(reward: RewardSpec, *, workers: int | None = None) -> Iterator[Scorer]:
    """Provide the scorer that `reward` names and end its workers afterwards.

    Raises:
        SpecError: the plug-in of kind `python` cannot be imported; nothing was scored.
    """
    if reward.kind == "dapo_math":
        yield DapoScorer(reward.variant)
    elif reward.kind == "math_verify":
        with MathScorer(
            answer_format=reward.answer_format, deadline_seconds=reward.timeout_seconds, workers=workers
        ) as scorer:
            yield scorer
    else:
        if reward.function is None:
            raise AssertionError("the specification requires a function for kind python")
        with PlugInScorer(reward.function, deadline_seconds=reward.timeout_seconds, workers=workers) as plug_in:
            plug_in.require_usable()
            yield plug_in


def score_rollouts(
    prompt: Prompt, rollouts: Sequence[Rollout], reward: RewardSpec, scorer: Scorer | None = None
) -> tuple[Score, ...]:
    """Score the responses to `prompt`, in order; `scorer` spares starting workers for every prompt.

    Raises:
        DataRefused: the ground truth cannot be compared with anything, or a rollout answers another prompt.
    """
    for rollout in rollouts:
        if rollout.prompt_id != prompt.prompt_id or rollout.prompt_token_ids != prompt.token_ids:
            raise DataRefused(
                f"rollout {rollout.prompt_id}[{rollout.index}] was not sampled from prompt {prompt.prompt_id}; "
                "sample this transaction again"
            )
    if scorer is None:
        with open_scorer(reward) as own:
            return score_rollouts(prompt, rollouts, reward, own)
    problem = scorer.truth_problem(prompt.ground_truth)
    if problem is not None:
        raise DataRefused(
            f"prompt {prompt.prompt_id} (data row {prompt.row}): ground truth {prompt.ground_truth[:80]!r} {problem}; "
            "correct reward_model.ground_truth in the data file"
        )
    scored = [rollout for rollout in rollouts if not (rollout.truncated and reward.truncated == "no_answer")]
    verdicts = iter(scorer.judge([(rollout.text, prompt.ground_truth) for rollout in scored]))
    cut_off = Verdict(-1.0, False, "no_answer", None, f"{scorer.name}:truncated")
    kept = {id(rollout) for rollout in scored}
    return tuple(_score(rollout, next(verdicts) if id(rollout) in kept else cut_off, reward) for rollout in rollouts)


def _score(rollout: Rollout, verdict: Verdict, reward: RewardSpec) -> Score:
    penalty = _penalty(len(rollout.token_ids), reward)
    return Score(
        index=rollout.index,
        reward=verdict.reward + penalty,
        correct=verdict.correct,
        status=verdict.status,
        extracted=verdict.extracted,
        canonical=verdict.canonical,
        rule=verdict.rule,
        penalty=penalty,
    )


def truth_check(reward: RewardSpec) -> Callable[[str], str | None]:
    """Return the function that says why the scorer cannot use a ground truth (None: it can)."""

    @lru_cache(maxsize=1 << 16)
    def check(ground_truth: str) -> str | None:
        if reward.kind == "dapo_math":
            return dapo_math.truth_problem(ground_truth, reward.variant)
        if reward.kind == "python":
            return None if ground_truth.strip() else "is empty"
        with MathScorer(answer_format=reward.answer_format, deadline_seconds=reward.timeout_seconds) as scorer:
            return scorer.truth_problem(ground_truth)

    return check


def check_reward(reward: RewardSpec) -> None:
    """Check that the scorer can work at all, before anything is computed.

    Raises:
        SpecError: the plug-in of kind `python` cannot be imported.
    """
    if reward.kind == "python":
        with open_scorer(reward, workers=1):
            pass


def _penalty(tokens: int, reward: RewardSpec) -> float:
    if reward.overlong_max_tokens is None or reward.overlong_cache_tokens is None:
        return 0.0
    return overlong_penalty(tokens, max_tokens=reward.overlong_max_tokens, cache_tokens=reward.overlong_cache_tokens)

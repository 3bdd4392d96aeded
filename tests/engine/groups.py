"""Builds scored groups and log-probability records for tests."""

from collections.abc import Sequence

from longstraw_core.spec.records import FinishReason, ResponseLogprobs, Rollout, Score, ScoredGroup, SignalStatus


def scored_group(
    prompt: Sequence[int],
    responses: Sequence[Sequence[int]],
    advantages: Sequence[float],
    *,
    sampler_logprobs: Sequence[Sequence[float]] | None = None,
    finish: Sequence[FinishReason] | None = None,
    status: SignalStatus = "signal",
    prompt_id: str = "p0",
) -> ScoredGroup:
    rollouts = tuple(
        Rollout(
            prompt_id=prompt_id,
            index=index,
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(response),
            logprobs=tuple([-1.0] * len(response) if sampler_logprobs is None else sampler_logprobs[index]),
            temperature=1.0,
            finish_reason="stop" if finish is None else finish[index],
            text="",
        )
        for index, response in enumerate(responses)
    )
    scores = tuple(
        Score(index=index, reward=0.0, correct=False, status="ok", extracted=None, rule="test")
        for index in range(len(responses))
    )
    return ScoredGroup(
        prompt_id=prompt_id,
        rollouts=rollouts,
        scores=scores,
        advantages=tuple(advantages),
        status=status,
        reward_mean=0.0,
        reward_std=1.0,
    )


def records(
    group: ScoredGroup,
    old_logprobs: Sequence[Sequence[float]],
    reference_logprobs: Sequence[Sequence[float]] | None = None,
) -> list[ResponseLogprobs]:
    return [
        ResponseLogprobs(
            prompt_id=group.prompt_id,
            index=rollout.index,
            old_logprobs=tuple(old_logprobs[rollout.index]),
            reference_logprobs=None if reference_logprobs is None else tuple(reference_logprobs[rollout.index]),
        )
        for rollout in group.rollouts
    ]

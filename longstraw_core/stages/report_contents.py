"""Turns records and metrics of a transaction into what the reports show."""

from collections.abc import Mapping, Sequence

from longstraw_core.spec import Prompt, ResponseLogprobs, ScoredGroup
from longstraw_core.stages.report import HistoryPoint, SampleResponse


def history_points(metric_history: Sequence[Mapping[str, float]]) -> tuple[HistoryPoint, ...]:
    """One point per transaction that led to this policy, oldest first."""
    return tuple(
        HistoryPoint(
            transaction=number,
            reward=metrics["reward"],
            reward_std=metrics.get("reward_std", 0.0),
            mean_length=metrics.get("completions/mean_length"),
            clipped_ratio=metrics.get("completions/clipped_ratio"),
            loss=metrics.get("loss"),
            gradient_norm=metrics.get("grad_norm"),
            kl=metrics.get("kl_to_old"),
            stepped="grad_norm" in metrics,
        )
        for number, metrics in enumerate(metric_history, start=1)
    )


def response_lengths(groups: Sequence[ScoredGroup]) -> tuple[int, ...]:
    """Length of every response, in tokens."""
    return tuple(len(rollout.token_ids) for group in groups for rollout in group.rollouts)


def logprob_differences(groups: Sequence[ScoredGroup], logprobs: Sequence[ResponseLogprobs]) -> tuple[float, ...]:
    """Per token: trainer's old log-probability minus the sampler's."""
    old = {(record.prompt_id, record.index): record.old_logprobs for record in logprobs}
    return tuple(
        mine - sampled
        for group in groups
        for rollout in group.rollouts
        for mine, sampled in zip(old[(group.prompt_id, rollout.index)], rollout.logprobs, strict=True)
    )


def sample_responses(groups: Sequence[ScoredGroup], prompts: Sequence[Prompt]) -> tuple[SampleResponse, ...]:
    """The best and the worst response of every group, for people to read."""
    truths = {prompt.prompt_id: prompt.ground_truth for prompt in prompts}
    samples: list[SampleResponse] = []
    for group in groups:
        ranked = sorted(range(len(group.scores)), key=lambda index: (-group.scores[index].reward, index))
        for index in dict.fromkeys((ranked[0], ranked[-1])):
            rollout = group.rollouts[index]
            samples.append(
                SampleResponse(
                    prompt_id=group.prompt_id,
                    score=group.scores[index],
                    advantage=group.advantages[index],
                    tokens=len(rollout.token_ids),
                    text=rollout.text,
                    ground_truth=truths[group.prompt_id],
                    finish_reason=rollout.finish_reason,
                )
            )
    return tuple(samples)

"""Stage `old_logprobs`: the trainer's log-probabilities of every response before the update."""

from longstraw_core.spec import ResponseLogprobs, Rollout
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.grouping import by_prompt
from longstraw_core.stages.policy_inputs import (
    POLICY_PREFIX,
    REFERENCE_PREFIX,
    needs_reference,
    open_policy,
    prefix_directory,
)


def execute(context: StageContext) -> StageResult:
    """Publish `logprobs`, one record per response."""
    import torch

    spec = context.spec
    inputs = open_policy(context)
    policy = inputs.policy
    root = context.open_tree("capture_prefix", "prefix")
    rollouts = context.read_records("sample", "rollouts", Rollout)
    groups = by_prompt(inputs.prompts, rollouts, spec.sampling.group_size, "sample/rollouts")
    records: list[ResponseLogprobs] = []
    differences: list[float] = []

    def replay_group(number: int, kind: str, *, adapter: bool) -> list[tuple[float, ...]]:
        reference = kind == REFERENCE_PREFIX
        state = policy.load_state(
            prefix_directory(root, number, kind), inputs.identity(inputs.prompts[number], reference=reference)
        )
        logprobs = [
            tuple(
                policy.replay(
                    state, rollout.token_ids, temperature=rollout.temperature, adapter=adapter
                ).logprobs_R.tolist()
            )
            for rollout in groups[number]
        ]
        state.release()
        return logprobs

    with context.phase("old log-probs"), torch.no_grad():
        for number, group in enumerate(groups):
            old = replay_group(number, POLICY_PREFIX, adapter=True)
            reference: list[tuple[float, ...] | None] = [None] * len(group)
            if needs_reference(context):
                kind = REFERENCE_PREFIX if policy.captures_with_adapter else POLICY_PREFIX
                reference = list(replay_group(number, kind, adapter=False))
            for rollout, old_logprobs, reference_logprobs in zip(group, old, reference, strict=True):
                records.append(
                    ResponseLogprobs(
                        prompt_id=rollout.prompt_id,
                        index=rollout.index,
                        old_logprobs=old_logprobs,
                        reference_logprobs=reference_logprobs,
                    )
                )
                differences += [
                    abs(mine - sampled) for mine, sampled in zip(old_logprobs, rollout.logprobs, strict=True)
                ]
            context.log.progress("groups replayed", number + 1, len(groups))
    return StageResult(
        outputs={"logprobs": context.write_records(records)},
        metrics={
            "sampling/sampling_logp_difference/mean": sum(differences) / len(differences),
            "sampling/sampling_logp_difference/max": max(differences),
        },
    )

"""Stage `old_logprobs`: the trainer's log-probabilities of every response before the update.

Here sampler and trainer are compared, because here the trainer's log-probabilities exist.
"""

from longstraw_core.rollout.faithfulness import agreement, check_agreement, compared_responses
from longstraw_core.spec import ResponseLogprobs, Rollout
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.grouping import by_prompt
from longstraw_core.stages.policy_inputs import POLICY_PREFIX, REFERENCE_PREFIX, needs_reference, open_policy
from longstraw_core.stages.prefix_handoff import PrefixReader, stale_fact


def execute(context: StageContext) -> StageResult:
    """Publish `logprobs`, one record per response."""
    import torch

    from longstraw_core.training.session import TrainingSession

    spec = context.spec
    session = TrainingSession(context.ranks)
    with session.phase("load"):
        inputs = open_policy(context)
    policy = inputs.policy
    prefix = PrefixReader(context, inputs)
    rollouts = context.read_records("sample", "rollouts", Rollout)
    groups = by_prompt(inputs.prompts, rollouts, spec.sampling.group_size, "sample/rollouts")
    records: list[ResponseLogprobs] = []
    everything: list[tuple[Rollout, tuple[float, ...]]] = []
    compared: list[tuple[Rollout, tuple[float, ...]]] = []

    def replay_group(number: int, kind: str, *, adapter: bool) -> list[tuple[float, ...]]:
        with session.phase(prefix.phase):
            state = prefix.open(number, kind, inputs.prompts[number])
        with session.phase("old_logprobs"):
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
            pairs = list(zip(group, old, strict=True))
            everything += pairs
            compared += [
                pairs[position] for position in compared_responses(group, spec.sampling.faithfulness.share, spec.seed)
            ]
            context.log.progress("groups replayed", number + 1, len(groups))
    found, overall = agreement(compared), agreement(everything)
    check_agreement(found, spec.sampling.faithfulness)
    with session.phase("release"):
        outputs = {"logprobs": context.write_records(records)} if context.leads else {}
    return StageResult(
        outputs=outputs,
        metrics={
            "sampling/sampling_logp_difference/mean": overall.mean,
            "sampling/sampling_logp_difference/max": overall.max,
            "faithfulness/responses": float(found.responses),
            "faithfulness/tokens": float(found.tokens),
            "faithfulness/mean": found.mean,
            "faithfulness/max": found.max,
            "prefix/stale_steps": float(prefix.stale_steps),
        },
        facts=stale_fact(prefix.stale_steps),
    )

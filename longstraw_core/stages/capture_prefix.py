"""Stage `capture_prefix`: every prompt once, without autograd, into resident state that the next stages restore."""

from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.policy_inputs import REFERENCE_PREFIX, open_policy
from longstraw_core.stages.prefix_handoff import PrefixWriter, prefix_kinds, stale_fact


def execute(context: StageContext) -> StageResult:
    """Publish the tree `prefix`: per prompt the policy's state and, with a KL term, the reference's."""
    from longstraw_core.training.session import TrainingSession

    session = TrainingSession(context.ranks)
    with session.phase("load"):
        inputs = open_policy(context)
    policy = inputs.policy
    writer = PrefixWriter(context, inputs)
    recapture = context.spec.prefix.handoff == "recapture"
    tokens, state_bytes = 0, 0
    with context.phase("capture"):
        for number, prompt in enumerate(inputs.prompts):
            for kind in prefix_kinds(context, inputs):
                if recapture:
                    policy.pool.require(policy.state_bytes(len(prompt.token_ids)).captured, f"prompt {number + 1}")
                    writer.write(number, kind, prompt, None)
                    continue
                if writer.take_over(number, kind, prompt):
                    continue
                with session.phase("capture"):
                    state = policy.capture(
                        prompt.token_ids,
                        adapter=policy.captures_with_adapter and kind != REFERENCE_PREFIX,
                        progress=lambda done, total, number=number: context.log.progress(
                            f"prompt {number + 1}/{len(inputs.prompts)} tokens captured", done, total
                        ),
                    )
                writer.write(number, kind, prompt, state)
                tokens += state.captured_tokens
                state_bytes = max(state_bytes, policy.state_bytes(len(prompt.token_ids)).total)
                state.release()
    with context.phase("publish"), session.phase("release"):
        prefix = writer.publish()
    return StageResult(
        outputs={} if prefix is None else {"prefix": prefix},
        metrics={
            "prefix/captured_tokens": float(tokens),
            "prefix/state_bytes": float(state_bytes),
            "prefix/taken_over": float(writer.taken_over),
            "prefix/stale_steps": float(writer.stale_steps),
        },
        status="recapture" if recapture else "ok",
        facts=stale_fact(writer.stale_steps),
    )

"""Stage `capture_prefix`: every prompt once, without autograd, into resident state that the next stages restore."""

from longstraw_core.artifacts.trees import publish_tree
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.policy_inputs import (
    POLICY_PREFIX,
    REFERENCE_PREFIX,
    needs_reference,
    open_policy,
    prefix_directory,
)


def execute(context: StageContext) -> StageResult:
    """Publish the tree `prefix`: per prompt the policy's state and, with a KL term, the reference's."""
    inputs = open_policy(context)
    policy = inputs.policy
    root = context.scratch / "prefix"
    kinds = [(POLICY_PREFIX, False)]
    # In response_adapter mode the policy's own prompt is captured with the adapter off: the reference shares it.
    if needs_reference(context) and policy.captures_with_adapter:
        kinds.append((REFERENCE_PREFIX, True))
    tokens, state_bytes = 0, 0
    with context.phase("capture"):
        for number, prompt in enumerate(inputs.prompts):
            for kind, reference in kinds:
                state = policy.capture(
                    prompt.token_ids,
                    adapter=policy.captures_with_adapter and not reference,
                    progress=lambda done, total, number=number: context.log.progress(
                        f"prompt {number + 1}/{len(inputs.prompts)} tokens captured", done, total
                    ),
                )
                directory = prefix_directory(root, number, kind)
                directory.parent.mkdir(parents=True, exist_ok=True)
                state.save(directory, inputs.identity(prompt, reference=reference))
                tokens += state.captured_tokens
                state_bytes = max(state_bytes, policy.state_bytes(len(prompt.token_ids)).total)
                state.release()
    with context.phase("publish"):
        prefix = publish_tree(context.store, root)
    return StageResult(
        outputs={"prefix": prefix},
        metrics={"prefix/captured_tokens": float(tokens), "prefix/state_bytes": float(state_bytes)},
    )

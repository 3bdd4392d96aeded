"""Stage `sample`: a group of responses for every prompt, from the current adapter."""

from longstraw_core.spec import Prompt, Rollout
from longstraw_core.stages.context import StageContext, StageResult


def execute(context: StageContext) -> StageResult:
    """Publish `rollouts`, grouped by prompt in the order of the prompts."""
    from transformers import AutoTokenizer

    from longstraw_core.rollout.transformers_sampler import check_prompt, sample_group
    from longstraw_core.training.model import load_policy_model

    spec = context.spec
    prompts = context.read_records("audit_data", "prompts", Prompt)
    adapter = context.open_tree("export_lora", "adapter")
    snapshot = context.model_snapshot()
    with context.phase("load model"):
        model = load_policy_model(snapshot, adapter, spec.model)
        tokenizer = AutoTokenizer.from_pretrained(snapshot, local_files_only=True)
    for prompt in prompts:
        check_prompt(model.config, prompt, spec.sampling.max_response_tokens)
    rollouts: list[Rollout] = []
    with context.phase("sample"):
        for number, prompt in enumerate(prompts, start=1):
            rollouts += sample_group(
                model,
                tokenizer,
                prompt,
                spec.sampling,
                seed=spec.seed,
                transaction=context.transaction,
                prompt_chunk_tokens=spec.layout.prompt_chunk_tokens,
                adapter_on_prompt=spec.objective.gradient != "response_adapter",
            )
            context.log.progress("groups sampled", number, len(prompts))
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return StageResult(
        outputs={"rollouts": context.write_records(rollouts)},
        metrics={
            "sampling/responses": float(len(rollouts)),
            "sampling/tokens": float(tokens),
            "completions/mean_length": tokens / len(rollouts),
            "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        },
    )

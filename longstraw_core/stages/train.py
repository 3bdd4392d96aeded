"""Stage `train`: replay every response with autograd, finalise once, one optimizer step, a new checkpoint."""

from typing import TYPE_CHECKING

from longstraw_core.artifacts.trees import publish_tree
from longstraw_core.spec import Prompt, ResponseLogprobs, ScoredGroup
from longstraw_core.spec.descriptors import MEDIA_TYPE_HTML
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.grouping import by_prompt
from longstraw_core.stages.policy_inputs import POLICY_PREFIX, open_policy, prefix_directory
from longstraw_core.stages.report import TrainReport, render_train_report
from longstraw_core.stages.report_contents import (
    history_points,
    logprob_differences,
    response_lengths,
    sample_responses,
)

if TYPE_CHECKING:
    from longstraw_core.resident import PrefixState


def execute(context: StageContext) -> StageResult:
    """Publish the tree `checkpoint` and the HTML `report`."""
    import torch

    from longstraw_core.rewards.groups import group_metrics
    from longstraw_core.training.checkpoint import TrainerState, load_checkpoint, save_checkpoint
    from longstraw_core.training.optimizer import AdapterOptimizer
    from longstraw_core.training.update import UpdateGroup, run_update

    spec = context.spec
    parent = context.parent_tree()
    inputs = open_policy(context)
    groups = context.read_records("score_rewards", "scored_groups", ScoredGroup)
    logprobs = context.read_records("old_logprobs", "logprobs", ResponseLogprobs)
    grouped = by_prompt(inputs.prompts, logprobs, spec.sampling.group_size, "old_logprobs/logprobs")
    prefix = context.open_tree("capture_prefix", "prefix")
    optimizer = AdapterOptimizer(inputs.policy.model, spec.optimizer)
    if parent is None:
        torch.manual_seed(spec.seed)
        earlier = None
    else:
        earlier = load_checkpoint(parent, inputs.policy.model, optimizer)

    def open_state(number: int, prompt: Prompt) -> "PrefixState":
        return inputs.policy.load_state(
            prefix_directory(prefix, number, POLICY_PREFIX), inputs.identity(prompt, reference=False)
        )

    result = run_update(
        inputs.policy,
        [
            UpdateGroup(
                group=group,
                logprobs=group_logprobs,
                open_state=lambda number=number, prompt=prompt: open_state(number, prompt),
            )
            for number, (prompt, group, group_logprobs) in enumerate(zip(inputs.prompts, groups, grouped, strict=True))
        ],
        objective=spec.objective,
        optimizer=optimizer,
        max_response_tokens=spec.sampling.max_response_tokens,
        progress=context.log.progress,
    )
    context.phases.extend(result.phases)
    # Sampler and trainer are compared over all tokens, not over the trained ones alone: one name, one value.
    compared = context.receipts["old_logprobs"].predicate.metrics
    metrics = {**group_metrics(groups), **result.metrics, **compared}
    transaction = 1 if earlier is None else earlier.transaction + 1
    state = TrainerState(
        optimizer_steps=optimizer.steps_taken,
        transaction=transaction,
        data_position=context.data_position,
        seed=spec.seed,
        metric_history=(*(() if earlier is None else earlier.metric_history), metrics),
    )
    directory = context.scratch / "checkpoint"
    with context.phase("save checkpoint"):
        save_checkpoint(directory, inputs.policy.model, optimizer, state)
        checkpoint = publish_tree(context.store, directory)
    report = render_train_report(
        TrainReport(
            run=context.run,
            transaction=context.transaction,
            gradient=spec.objective.gradient,
            status=result.status,
            facts=(
                ("seed", str(spec.seed)),
                ("model snapshot", inputs.snapshot_digest),
                ("adapter before", inputs.adapter_digest),
                ("checkpoint", checkpoint.digest),
                ("optimizer steps so far", str(optimizer.steps_taken)),
            ),
            history=history_points(state.metric_history),
            response_lengths=response_lengths(groups),
            logprob_differences=logprob_differences(groups, logprobs),
            phases=tuple(context.phases),
            metrics=metrics,
            samples=sample_responses(groups, inputs.prompts),
        )
    )
    return StageResult(
        outputs={"checkpoint": checkpoint, "report": context.store.put_blob(report, MEDIA_TYPE_HTML)},
        metrics={**metrics, "optimizer/steps": float(optimizer.steps_taken)},
        status=result.status,
    )

"""Stage `train`: replay every response with autograd, finalise once, one optimizer step, a new checkpoint."""

from typing import TYPE_CHECKING

from longstraw_core.artifacts.trees import publish_tree
from longstraw_core.spec import Prompt, ResponseLogprobs, ScoredGroup
from longstraw_core.spec.canonical import canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_HTML, MEDIA_TYPE_JSON
from longstraw_core.spec.rank_sessions import RankSession, RankSessions, check_agreement
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.grouping import by_prompt
from longstraw_core.stages.policy_inputs import POLICY_PREFIX, open_policy
from longstraw_core.stages.prefix_handoff import PrefixReader, stale_fact
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
    """Publish the tree `checkpoint`, the HTML `report` and `rank_sessions`.

    Every rank takes part in everything up to the checkpoint's tensors; rank 0 writes.
    """
    import torch

    from longstraw_core.rewards.groups import group_metrics
    from longstraw_core.training.checkpoint import TrainerState, load_checkpoint, save_checkpoint
    from longstraw_core.training.optimizer_choice import make_optimizer
    from longstraw_core.training.session import TrainingSession
    from longstraw_core.training.update import UpdateGroup, run_update

    spec = context.spec
    ranks = context.ranks
    session = TrainingSession(ranks)
    parent = context.parent_tree()
    with session.phase("load"):
        inputs = open_policy(context)
        optimizer = make_optimizer(inputs.policy.model, spec.optimizer, ranks)
        if parent is None:
            torch.manual_seed(spec.seed)
            earlier = None
        else:
            earlier = load_checkpoint(parent, inputs.policy.model, optimizer, ranks)
    session.watch(optimizer)
    groups = context.read_records("score_rewards", "scored_groups", ScoredGroup)
    logprobs = context.read_records("old_logprobs", "logprobs", ResponseLogprobs)
    grouped = by_prompt(inputs.prompts, logprobs, spec.sampling.group_size, "old_logprobs/logprobs")
    prefix = PrefixReader(context, inputs)

    def open_state(number: int, prompt: Prompt) -> "PrefixState":
        return prefix.open(number, POLICY_PREFIX, prompt)

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
        clock=session,
        opening=prefix.phase,
        before_step=lambda: session.witness_gradients(optimizer, spec.seed),
    )
    context.phases.extend(phase for phase in result.phases if phase.name != "load")
    # Sampler and trainer are compared over all tokens, not over the trained ones alone: one name, one value.
    compared = context.receipts["old_logprobs"].predicate.metrics
    compared = {name: value for name, value in compared.items() if name.startswith(("sampling/", "faithfulness/"))}
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
    with session.phase("checkpoint"), context.phase("save checkpoint"):
        save_checkpoint(directory, inputs.policy.model, optimizer, state, ranks)
    with session.phase("release"):
        inputs.policy.model.zero_grad(set_to_none=True)
    sessions = _rank_sessions(context, session.report(optimizer))
    if not context.leads:
        return StageResult(outputs={}, metrics={})
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
        outputs={
            "checkpoint": checkpoint,
            "report": context.store.put_blob(report, MEDIA_TYPE_HTML),
            "rank_sessions": context.store.put_blob(canonical_json(sessions), MEDIA_TYPE_JSON),
        },
        metrics={
            **metrics,
            "optimizer/steps": float(optimizer.steps_taken),
            "prefix/stale_steps": float(prefix.stale_steps),
        },
        status=result.status,
        facts=stale_fact(prefix.stale_steps),
    )


def _rank_sessions(context: StageContext, mine: RankSession) -> RankSessions:
    """Gather what all ranks report; every rank refuses when they disagree, and nothing is published.

    Raises:
        NumericError, StageFailed: as `check_agreement`.
    """
    ranks = context.ranks
    gathered = ranks.gather(canonical_json(mine))
    sessions = RankSessions(
        run=context.run,
        transaction=context.transaction,
        context_parallel=ranks.size,
        expert_parallel=ranks.expert_size,
        sessions=tuple(RankSession.model_validate_json(content) for content in gathered),
    )
    check_agreement(sessions)
    return sessions

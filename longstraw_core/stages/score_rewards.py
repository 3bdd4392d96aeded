"""Stage `score_rewards`: rewards and advantages of every group."""

from longstraw_core.rewards.groups import group_metrics, score_group
from longstraw_core.spec import Prompt, Rollout, ScoredGroup
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.grouping import by_prompt


def execute(context: StageContext) -> StageResult:
    """Publish `scored_groups`, one per prompt."""
    spec = context.spec
    prompts = context.read_records("audit_data", "prompts", Prompt)
    rollouts = context.read_records("sample", "rollouts", Rollout)
    groups: list[ScoredGroup] = []
    with context.phase("score"):
        grouped = by_prompt(prompts, rollouts, spec.sampling.group_size, "sample/rollouts")
        for number, (prompt, group) in enumerate(zip(prompts, grouped, strict=True), start=1):
            groups.append(score_group(prompt, group, spec.reward, normalize=spec.objective.normalize_advantages))
            context.log.progress("groups scored", number, len(prompts))
    return StageResult(
        outputs={"scored_groups": context.write_records(list(groups))},
        metrics=group_metrics(groups),
        status="ok" if any(group.status == "signal" for group in groups) else "no_signal",
    )

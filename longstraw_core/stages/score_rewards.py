"""Stage `score_rewards`: rewards and advantages of every group, and what the two math scorers say about them."""

from longstraw_core.rewards.groups import group_metrics, score_group
from longstraw_core.rewards.math_equality import MathScorer
from longstraw_core.rewards.scoring import DapoScorer, open_scorer
from longstraw_core.rewards.statistics import scoring_report
from longstraw_core.spec import Prompt, Rollout, ScoredGroup, canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.grouping import by_prompt


def execute(context: StageContext) -> StageResult:
    """Publish `scored_groups`, one per prompt, and their `statistics`."""
    spec = context.spec
    prompts = context.read_records("audit_data", "prompts", Prompt)
    rollouts = context.read_records("sample", "rollouts", Rollout)
    groups: list[ScoredGroup] = []
    grouped = by_prompt(prompts, rollouts, spec.sampling.group_size, "sample/rollouts")
    with context.phase("score"), open_scorer(spec.reward) as scorer:
        for number, (prompt, group) in enumerate(zip(prompts, grouped, strict=True), start=1):
            groups.append(
                score_group(prompt, group, spec.reward, normalize=spec.objective.normalize_advantages, scorer=scorer)
            )
            context.log.progress("groups scored", number, len(prompts))
    with context.phase("compare scorers"), MathScorer(deadline_seconds=spec.reward.timeout_seconds) as mathematical:
        report = scoring_report(
            prompts, groups, scorer.name, dapo=DapoScorer(spec.reward.variant), mathematical=mathematical
        )
    agreement = report.agreement
    return StageResult(
        outputs={
            "scored_groups": context.write_records(groups),
            "statistics": context.store.put_blob(canonical_json(report), MEDIA_TYPE_JSON),
        },
        metrics=group_metrics(groups)
        | {
            "completions/median_length": float(report.lengths.median),
            "completions/p90_length": float(report.lengths.p90),
            "scorers/compared": float(agreement.compared),
            "scorers/disagreements": float(len(agreement.disagreements)),
        }
        | ({} if agreement.share is None else {"scorers/agreement_share": agreement.share}),
        status="ok" if any(group.status == "signal" for group in groups) else "no_signal",
        facts={"reward": scorer.name},
    )

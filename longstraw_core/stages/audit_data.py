"""Stage `audit_data`: check the snapshot and every data row, tokenize, select this transaction's prompts."""

from pathlib import Path

from longstraw_core.artifacts.external import describe_external_file, describe_external_tree
from longstraw_core.artifacts.policy import check_policy_parent
from longstraw_core.rewards.audit import audit_rows
from longstraw_core.rewards.prompt_tokens import load_prompt_tokenizer, prompt_token_limit, read_model_limits
from longstraw_core.rewards.row_sources import is_parquet
from longstraw_core.rewards.scoring import check_reward, truth_check
from longstraw_core.spec import DataRefused, IntegrityError, canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON, MEDIA_TYPE_JSON_LINES, MEDIA_TYPE_PARQUET
from longstraw_core.stages.context import DATA_INPUT, SNAPSHOT_INPUT, StageContext, StageResult
from longstraw_core.stages.layout_check import check_layout
from longstraw_core.stages.snapshot import check_snapshot


def execute(context: StageContext) -> StageResult:
    """Publish `prompts` and `audit`; describe the model snapshot and the data file, which stay where they are."""
    spec = context.spec
    snapshot, rows = Path(spec.model.snapshot), Path(spec.data.path)
    with context.phase("hash model snapshot"):
        check_snapshot(snapshot, spec.model.family)
        check_layout(snapshot, spec.model.family, spec.layout)
        model_snapshot = describe_external_tree(context.store, snapshot)
    context.inputs[SNAPSHOT_INPUT] = model_snapshot
    if spec.model.digest is not None and spec.model.digest != model_snapshot.digest:
        raise IntegrityError(
            f"model.digest: expected {spec.model.digest}, observed {model_snapshot.digest} in {snapshot}; "
            "use the snapshot that was pinned, or pin this one"
        )
    parent = context.parent_manifest()
    if parent is not None and parent.model_snapshot.digest != model_snapshot.digest:
        raise IntegrityError(
            f"the parent checkpoint was trained on model snapshot {parent.model_snapshot.digest}, "
            f"{snapshot} is {model_snapshot.digest}; an adapter fits only the model it was trained on"
        )
    if spec.storage.policy is not None:
        check_policy_parent(context.store, spec.storage.policy, context.parent_descriptor)
    limits = read_model_limits(snapshot, spec.model.rope_scaling)
    check_reward(spec.reward)
    with context.phase("audit rows"):
        audit = audit_rows(
            rows,
            data=spec.data,
            seed=spec.seed,
            # the first transaction boundary at or after what was read, whatever a transaction's size was before
            transaction=1 + (0 if parent is None else -(-parent.data_position // spec.data.prompts_per_transaction)),
            tokenize=load_prompt_tokenizer(snapshot),
            token_limit=prompt_token_limit(spec.data, limits, spec.sampling.max_response_tokens),
            vocabulary=limits.vocabulary,
            check_truth=truth_check(spec.reward),
        )
    data_file = describe_external_file(rows, MEDIA_TYPE_PARQUET if is_parquet(rows) else MEDIA_TYPE_JSON_LINES)
    if data_file.digest != audit.report.data_digest:
        raise DataRefused(f"{rows}: changed while it was read; run again when nothing writes to it")
    previous = context.previous_receipt("audit_data")
    if previous is not None and previous.predicate.inputs[DATA_INPUT].digest != data_file.digest:
        raise DataRefused(f"{rows}: changed since the transaction before; one run reads one data file")
    context.inputs[DATA_INPUT] = data_file
    report = audit.report
    return StageResult(
        outputs={
            "prompts": context.write_records(audit.prompts),
            "audit": context.store.put_blob(canonical_json(report), MEDIA_TYPE_JSON),
        },
        metrics={
            "data/rows": float(report.rows),
            "data/eligible": float(report.eligible),
            "data/duplicates_dropped": float(report.duplicates_dropped),
            "data/conflicting_prompts": float(report.conflicting_prompts),
            **{f"data/dropped/{finding.kind}": float(finding.dropped) for finding in report.findings},
            "data/position": float(report.position),
            "data/epoch": float(report.epoch),
            "prompts/count": float(len(audit.prompts)),
            "prompts/mean_length": sum(len(prompt.token_ids) for prompt in audit.prompts) / len(audit.prompts),
            "prompts/max_length": float(max(len(prompt.token_ids) for prompt in audit.prompts)),
        },
    )

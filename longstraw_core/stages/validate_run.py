"""Stage `validate_run`: re-hash what the transaction wrote, claim only what the receipts prove, move the policy."""

from typing import Literal

from longstraw_core.artifacts.outputs import check_receipt_outputs
from longstraw_core.artifacts.policy import advance_policy
from longstraw_core.spec import (
    CheckpointManifest,
    IntegrityError,
    Prompt,
    ResponseLogprobs,
    ScoredGroup,
    StageReceipt,
    canonical_json,
)
from longstraw_core.spec.descriptors import MEDIA_TYPE_HTML, MEDIA_TYPE_JSON
from longstraw_core.spec.model import StrictModel
from longstraw_core.spec.receipts import GradientMode, StageName
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.report import EvidenceRow, RunReport, StageRow, render_run_report
from longstraw_core.stages.report_contents import (
    history_points,
    logprob_differences,
    response_lengths,
    sample_responses,
)
from longstraw_core.stages.trainer_history import read_metric_history


class EvidenceLevel(StrictModel):
    """One claim about the transaction and whether its receipts prove it."""

    level: str
    proven: bool
    because: str


class Evidence(StrictModel):
    """What this transaction proves about itself; claims that its receipts cannot carry are listed as not proven."""

    kind: Literal["longstraw.evidence/1"] = "longstraw.evidence/1"
    run: str
    transaction: int
    gradient: GradientMode
    checkpoint_digest: str
    receipts: dict[str, str]
    levels: tuple[EvidenceLevel, ...]


def execute(context: StageContext) -> StageResult:
    """Publish `evidence` and the HTML `report` of the run so far; then the checkpoint becomes the policy's current one.

    The pointer moves last before the receipt: what it points to is validated, and no receipt says that a transaction
    is complete whose checkpoint lost against another run's.
    """
    with context.phase("re-hash artifacts"):
        for number, (stage, receipt) in enumerate(context.receipts.items(), start=1):
            check_receipt_outputs(context.store, receipt)
            _check_chain(stage, receipt, context)
            context.log.progress("receipts re-hashed", number, len(context.receipts))
    manifest = CheckpointManifest.model_validate_json(context.read_bytes("manifest_checkpoint", "checkpoint_manifest"))
    _check_checkpoint(manifest, context)
    digests = {stage: context.inputs[f"receipt:{stage}"].digest for stage in context.receipts}
    evidence = Evidence(
        run=context.run,
        transaction=context.transaction,
        gradient=context.spec.objective.gradient,
        checkpoint_digest=context.input("manifest_checkpoint", "checkpoint_manifest").digest,
        receipts=digests,
        levels=_levels(context, manifest),
    )
    with context.phase("report"):
        report = _report(context, manifest, evidence)
    proven = sum(level.proven for level in evidence.levels)
    outputs = {
        "evidence": context.store.put_blob(canonical_json(evidence), MEDIA_TYPE_JSON),
        "report": context.store.put_blob(report, MEDIA_TYPE_HTML),
    }
    if context.spec.storage.policy is not None:
        checkpoint = context.input("manifest_checkpoint", "checkpoint_manifest")
        advance_policy(context.store, context.spec.storage.policy, checkpoint, manifest)
    return StageResult(
        outputs=outputs,
        metrics={"evidence/proven": float(proven), "evidence/levels": float(len(evidence.levels))},
    )


def _check_chain(stage: StageName, receipt: StageReceipt, context: StageContext) -> None:
    """Every upstream receipt that a stage read must be the one in this run."""
    for key, descriptor in receipt.predicate.inputs.items():
        kind, _, upstream = key.partition(":")
        if kind != "receipt":
            continue
        here = context.inputs.get(key)
        if here is None or here.digest != descriptor.digest:
            found = "none" if here is None else here.digest
            raise IntegrityError(
                f"receipt of {stage}: it read the {upstream} receipt {descriptor.digest}, this run has {found}"
            )


def _check_checkpoint(manifest: CheckpointManifest, context: StageContext) -> None:
    """The manifest must describe exactly what `train` published."""
    trained = context.input("train", "checkpoint")
    if manifest.tree != trained:
        raise IntegrityError(
            f"checkpoint manifest describes tree {manifest.tree.digest}, train published {trained.digest}"
        )
    for stage, digest in manifest.receipts.items():
        here = context.inputs.get(f"receipt:{stage}")
        if here is None or here.digest != digest:
            found = "none" if here is None else here.digest
            raise IntegrityError(f"checkpoint manifest names receipt {digest} of {stage}, this run has {found}")


def _levels(context: StageContext, manifest: CheckpointManifest) -> tuple[EvidenceLevel, ...]:
    train = context.receipts["train"].predicate
    difference = context.receipts["old_logprobs"].predicate.metrics["sampling/sampling_logp_difference/mean"]
    limit = context.spec.sampling.faithfulness.mean_limit
    gradient = context.spec.objective.gradient
    phases = {phase.name for rank in train.ranks for phase in rank.phases} & {"replay", "reverse_sweep"}
    images = {receipt.predicate.image_digest for receipt in context.receipts.values()}
    ranks = len(train.ranks)
    checks: list[tuple[str, bool, str]] = [
        ("every artifact re-hashed to its receipt's digest", True, f"{len(context.receipts)} receipts"),
        (
            "checkpoint complete and described byte for byte",
            True,
            f"{len(manifest.files)} files, {sum(file.size for file in manifest.files)} bytes",
        ),
        (
            "one optimizer step was taken",
            manifest.stepped,
            f"train reports {train.status}"
            + (f", gradient norm {train.metrics['grad_norm']:.4g}" if manifest.stepped else ""),
        ),
        (
            "the trainer's log-probabilities equal the sampler's",
            difference <= limit,
            f"mean difference {difference:.3g} nats, limit {limit}",
        ),
        (
            "the full gradient was computed: replay, then reverse sweep through the prompt",
            gradient == "exact" and {"replay", "reverse_sweep"} <= phases,
            f"gradient mode {gradient}, phases {', '.join(sorted(phases)) or 'none'}",
        ),
        (
            "gradient parity with conventional training",
            False,
            "not measured by a run; the project's test suite measures it on small models",
        ),
        (
            "every stage ran in a digest-pinned image",
            None not in images,
            "image digests recorded" if None not in images else "at least one stage ran outside a container",
        ),
        ("the update ran on more than one rank", ranks > 1, f"{ranks} rank" + ("s" if ranks > 1 else "")),
    ]
    return tuple(EvidenceLevel(level=level, proven=proven, because=because) for level, proven, because in checks)


def _seconds(receipt: StageReceipt) -> float:
    return sum(phase.seconds for rank in receipt.predicate.ranks for phase in rank.phases)


def _report(context: StageContext, manifest: CheckpointManifest, evidence: Evidence) -> bytes:
    groups = context.read_records("score_rewards", "scored_groups", ScoredGroup)
    logprobs = context.read_records("old_logprobs", "logprobs", ResponseLogprobs)
    prompts = context.read_records("audit_data", "prompts", Prompt)
    train = context.receipts["train"].predicate
    return render_run_report(
        RunReport(
            run=context.run,
            gradient=context.spec.objective.gradient,
            status=train.status,
            facts=(
                ("transaction", str(context.transaction)),
                ("seed", str(context.spec.seed)),
                ("model snapshot", manifest.model_snapshot.digest),
                ("checkpoint manifest", evidence.checkpoint_digest),
                ("optimizer steps so far", str(manifest.optimizer_steps)),
                ("source digest", train.source_digest),
            ),
            history=history_points(read_metric_history(context.store, manifest.tree)),
            stages=tuple(
                StageRow(
                    stage=stage,
                    transaction=context.transaction,
                    seconds=_seconds(receipt),
                    peak_memory_bytes=max(
                        (phase.peak_memory_bytes for rank in receipt.predicate.ranks for phase in rank.phases),
                        default=0,
                    ),
                    receipt_digest=evidence.receipts[stage],
                    status=receipt.predicate.status,
                )
                for stage, receipt in context.receipts.items()
            ),
            evidence=tuple(
                EvidenceRow(level=level.level, proven=level.proven, because=level.because) for level in evidence.levels
            ),
            response_lengths=response_lengths(groups),
            logprob_differences=logprob_differences(groups, logprobs),
            phases=tuple(phase for rank in train.ranks for phase in rank.phases),
            metrics=train.metrics,
            samples=sample_responses(groups, prompts),
        )
    )

"""Stage `manifest_checkpoint`: re-hash the checkpoint and write the manifest of its every byte."""

from longstraw_core.artifacts.trees import read_manifest
from longstraw_core.spec import CheckpointManifest, IntegrityError, canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT
from longstraw_core.spec.receipts import CheckpointFile
from longstraw_core.stages.context import StageContext, StageResult

REQUIRED_FILES = (
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "optimizer.safetensors",
    "random_state.safetensors",
    "trainer_state.json",
)


def execute(context: StageContext) -> StageResult:
    """Publish `checkpoint_manifest`: the descriptor that the next transaction takes as its parent."""
    tree = context.input("train", "checkpoint")
    with context.phase("re-hash checkpoint"):
        context.materialize(tree, "checkpoint")
        entries = read_manifest(context.store, tree).entries
    missing = sorted(set(REQUIRED_FILES) - {entry.path for entry in entries})
    if missing:
        raise IntegrityError(f"checkpoint {tree.digest} lacks {', '.join(missing)}; it cannot be resumed from")
    parent = context.parent_manifest()
    train = context.receipts["train"].predicate
    manifest = CheckpointManifest(
        run=context.run,
        transaction=context.transaction,
        lineage=1 if parent is None else parent.lineage + 1,
        data_position=context.data_position,
        stepped=train.status == "stepped",
        optimizer_steps=int(train.metrics["optimizer/steps"]),
        tree=tree,
        files=tuple(CheckpointFile(path=entry.path, digest=entry.digest, size=entry.size) for entry in entries),
        parent=context.parent_descriptor,
        model_snapshot=context.snapshot_descriptor,
        spec_digest=train.spec_digest,
        gradient=train.gradient,
        receipts={stage: context.inputs[f"receipt:{stage}"].digest for stage in context.receipts},
    )
    return StageResult(
        outputs={"checkpoint_manifest": context.store.put_blob(canonical_json(manifest), MEDIA_TYPE_CHECKPOINT)},
        metrics={
            "checkpoint/files": float(len(entries)),
            "checkpoint/bytes": float(sum(entry.size for entry in entries)),
        },
        status="stepped" if manifest.stepped else train.status,
    )

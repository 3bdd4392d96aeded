"""Stage `export_lora`: the adapter directory that is sampled and trained, from the parent checkpoint or fresh."""

from longstraw_core.artifacts.trees import publish_tree
from longstraw_core.stages.context import StageContext, StageResult


def execute(context: StageContext) -> StageResult:
    """Publish the PEFT directory `adapter`."""
    from longstraw_core.training.lora import inject_adapter, load_adapter, save_adapter, trainable_parameters
    from longstraw_core.training.model import load_base_model

    spec = context.spec
    snapshot = context.model_snapshot()
    parent = context.parent_tree()
    with context.phase("load model"):
        base = load_base_model(snapshot, spec.model)
    with context.phase("prepare adapter"):
        if parent is None:
            model = inject_adapter(base, spec.lora, seed=spec.seed)
        else:
            model = load_adapter(base, parent / "adapter", expected=spec.lora)
        directory = context.scratch / "adapter"
        save_adapter(model, directory)
    parameters = trainable_parameters(model)
    return StageResult(
        outputs={"adapter": publish_tree(context.store, directory)},
        metrics={
            "adapter/tensors": float(len(parameters)),
            "adapter/parameters": float(sum(tensor.numel() for tensor in parameters.values())),
        },
        status="fresh" if parent is None else "from_checkpoint",
    )

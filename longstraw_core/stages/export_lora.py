"""Stage `export_lora`: the adapter directory that is sampled and trained, from the parent checkpoint or fresh."""

from longstraw_core.artifacts.trees import publish_tree
from longstraw_core.stages.context import StageContext, StageResult


def execute(context: StageContext) -> StageResult:
    """Publish the PEFT directory `adapter` and, for SGLang, `served`: it in the server's names, or merged.

    What the server would not serve as it is meant is refused by name.
    """
    from longstraw_core.rollout.adapter_rules import check_served_targets
    from longstraw_core.rollout.merged_checkpoint import write_merged_checkpoint
    from longstraw_core.rollout.served_adapter import write_served_adapter
    from longstraw_core.training.lora import (
        inject_adapter,
        load_adapter,
        save_adapter,
        target_names,
        trainable_parameters,
    )
    from longstraw_core.training.model import load_base_model

    spec = context.spec
    snapshot = context.model_snapshot()
    parent = context.parent_tree()
    with context.phase("load model"):
        base = load_base_model(snapshot, spec.model)
        if spec.sampling.engine == "sglang" and not spec.sampling.server.merge:
            check_served_targets(target_names(base, spec.lora), "lora.targets")
    with context.phase("prepare adapter"):
        if parent is None:
            model = inject_adapter(base, spec.lora, seed=spec.seed)
        else:
            model = load_adapter(base, parent / "adapter", expected=spec.lora)
        directory = context.scratch / "adapter"
        save_adapter(model, directory)
    outputs = {"adapter": publish_tree(context.store, directory)}
    if spec.sampling.engine == "sglang":
        with context.phase("prepare for the server"):
            served = context.scratch / "served"
            if spec.sampling.server.merge:
                write_merged_checkpoint(snapshot, directory, served)
            else:
                write_served_adapter(directory, snapshot, served)
            outputs["served"] = publish_tree(context.store, served)
    parameters = trainable_parameters(model)
    return StageResult(
        outputs=outputs,
        metrics={
            "adapter/tensors": float(len(parameters)),
            "adapter/parameters": float(sum(tensor.numel() for tensor in parameters.values())),
        },
        status="fresh" if parent is None else "from_checkpoint",
    )

"""KFP component of the stage `manifest_checkpoint`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("control"), install_kfp_package=False)
def manifest_checkpoint(
    spec: str,
    run: str,
    transaction: int,
    parent_checkpoint: str,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    sample_receipt: dsl.Input[dsl.Artifact],
    score_rewards_receipt: dsl.Input[dsl.Artifact],
    capture_prefix_receipt: dsl.Input[dsl.Artifact],
    old_logprobs_receipt: dsl.Input[dsl.Artifact],
    train_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> str:
    """Re-hash the checkpoint and write the manifest of its every byte."""
    from longstraw_core.stages.component import run_component

    return run_component("manifest_checkpoint", locals())

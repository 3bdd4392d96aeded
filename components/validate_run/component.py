"""KFP component of the stage `validate_run`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("control"), install_kfp_package=False)
def validate_run(
    spec: str,
    run: str,
    transaction: int,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    sample_receipt: dsl.Input[dsl.Artifact],
    score_rewards_receipt: dsl.Input[dsl.Artifact],
    capture_prefix_receipt: dsl.Input[dsl.Artifact],
    old_logprobs_receipt: dsl.Input[dsl.Artifact],
    train_receipt: dsl.Input[dsl.Artifact],
    manifest_checkpoint_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> None:
    """Re-hash everything this transaction wrote and state what its receipts prove."""
    from longstraw_core.stages.component import run_component

    run_component("validate_run", locals())

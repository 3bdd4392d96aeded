"""KFP component of the stage `old_logprobs`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("trainer"), install_kfp_package=False)
def old_logprobs(
    spec: str,
    run: str,
    transaction: int,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    sample_receipt: dsl.Input[dsl.Artifact],
    capture_prefix_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Compute the trainer's log-probabilities of every response before the update."""
    from longstraw_core.stages.component import run_component

    run_component("old_logprobs", locals())

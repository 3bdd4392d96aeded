"""KFP component of the stage `capture_prefix`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("trainer"), install_kfp_package=False)
def capture_prefix(
    spec: str,
    run: str,
    transaction: int,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Capture every prompt once, without autograd, into resident state."""
    from longstraw_core.stages.component import run_component

    run_component("capture_prefix", locals())

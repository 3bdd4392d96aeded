"""KFP component of the stage `sample`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("sampler"), install_kfp_package=False)
def sample(
    spec: str,
    run: str,
    transaction: int,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Sample a group of responses for every prompt with the adapter on."""
    from longstraw_core.stages.component import run_component

    run_component("sample", locals())

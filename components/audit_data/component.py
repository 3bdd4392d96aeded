"""KFP component of the stage `audit_data`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("control"), install_kfp_package=False)
def audit_data(
    spec: str,
    run: str,
    transaction: int,
    parent_checkpoint: str,
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Check every data row, tokenize, and select this transaction's prompts."""
    from longstraw_core.stages.component import run_component

    run_component("audit_data", locals())

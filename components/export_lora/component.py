"""KFP component of the stage `export_lora`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("trainer"), install_kfp_package=False)
def export_lora(
    spec: str,
    run: str,
    transaction: int,
    parent_checkpoint: str,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Write the LoRA adapter that is sampled and trained: the parent checkpoint's, or a fresh one."""
    from longstraw_core.stages.component import run_component

    run_component("export_lora", locals())

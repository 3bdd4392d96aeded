"""KFP component that launches the stage `sample` in several pods of its own; see docs/cluster.md."""

from kfp import dsl

from components.images import unpublished
from components.on_nodes import PASSED_ON


@dsl.component(base_image=unpublished("control"), install_kfp_package=False, task_config_passthroughs=PASSED_ON)
def sample_on_nodes(
    spec: str,
    run: str,
    transaction: int,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    placement: str,
    accelerator: str,
    pull_secret: str,
    task_config: dsl.TaskConfig,
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Sample a group of responses for every prompt with the adapter on."""
    from longstraw_core.stages.component import run_component

    run_component("sample", locals())

"""KFP component that launches the stage `train` in several pods of its own; see docs/cluster.md."""

from kfp import dsl

from components.images import unpublished
from components.on_nodes import PASSED_ON


@dsl.component(base_image=unpublished("control"), install_kfp_package=False, task_config_passthroughs=PASSED_ON)
def train_on_nodes(
    spec: str,
    run: str,
    transaction: int,
    parent_checkpoint: str,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    score_rewards_receipt: dsl.Input[dsl.Artifact],
    capture_prefix_receipt: dsl.Input[dsl.Artifact],
    old_logprobs_receipt: dsl.Input[dsl.Artifact],
    placement: str,
    accelerator: str,
    pull_secret: str,
    task_config: dsl.TaskConfig,
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> None:
    """Replay every response with autograd, finalise the gradient once, take one optimizer step."""
    from longstraw_core.stages.component import run_component

    run_component("train", locals())

"""KFP component of the stage `train`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("trainer"), install_kfp_package=False)
def train(
    spec: str,
    run: str,
    transaction: int,
    parent_checkpoint: str,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    export_lora_receipt: dsl.Input[dsl.Artifact],
    score_rewards_receipt: dsl.Input[dsl.Artifact],
    capture_prefix_receipt: dsl.Input[dsl.Artifact],
    old_logprobs_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> None:
    """Replay every response with autograd, finalise the gradient once, take one optimizer step."""
    from longstraw_core.stages.component import run_component

    run_component("train", locals())

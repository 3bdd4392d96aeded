"""KFP component of the stage `score_rewards`."""

from kfp import dsl

from components.images import unpublished


@dsl.component(base_image=unpublished("control"), install_kfp_package=False)
def score_rewards(
    spec: str,
    run: str,
    transaction: int,
    audit_data_receipt: dsl.Input[dsl.Artifact],
    sample_receipt: dsl.Input[dsl.Artifact],
    receipt: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Score every response and compute the groups' advantages."""
    from longstraw_core.stages.component import run_component

    run_component("score_rewards", locals())

"""The transaction pipeline: nine stages as a graph, chained N times through the checkpoint's descriptor."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.audit_data.component import audit_data
from components.capture_prefix.component import capture_prefix
from components.export_lora.component import export_lora
from components.manifest_checkpoint.component import manifest_checkpoint
from components.old_logprobs.component import old_logprobs
from components.sample.component import sample
from components.score_rewards.component import score_rewards
from components.train.component import train
from components.validate_run.component import validate_run


def _transaction_graph(exclusive_gpus: bool) -> Any:
    """Return the one-transaction pipeline; with `exclusive_gpus` capture waits for sampling."""

    @dsl.pipeline(name="transaction", description="One GRPO transaction: one adapter update from long shared prompts.")
    def transaction(spec: str, run: str, transaction: int, parent_checkpoint: str = "") -> str:
        identity = {"spec": spec, "run": run, "transaction": transaction}
        policy = {**identity, "parent_checkpoint": parent_checkpoint}

        def task(component: Callable[..., Any], arguments: dict[str, Any], **upstream: Any) -> Any:
            receipts = {f"{name}_receipt": stage.outputs["receipt"] for name, stage in upstream.items()}
            return component(**arguments, **receipts).set_caching_options(False)

        stages: dict[str, Any] = {}
        stages["audit_data"] = task(audit_data, policy)
        stages["export_lora"] = task(export_lora, policy, **stages)
        prompts_and_policy = dict(stages)
        stages["sample"] = task(sample, identity, **prompts_and_policy)
        stages["score_rewards"] = task(
            score_rewards, identity, audit_data=stages["audit_data"], sample=stages["sample"]
        )
        stages["capture_prefix"] = task(capture_prefix, identity, **prompts_and_policy)
        if exclusive_gpus:
            stages["capture_prefix"].after(stages["sample"])
        stages["old_logprobs"] = task(
            old_logprobs, identity, **{name: stage for name, stage in stages.items() if name != "score_rewards"}
        )
        stages["train"] = task(train, policy, **{name: stage for name, stage in stages.items() if name != "sample"})
        stages["manifest_checkpoint"] = task(manifest_checkpoint, policy, **stages)
        checkpoint = stages["manifest_checkpoint"].outputs["Output"]
        task(validate_run, identity, **stages)
        return checkpoint

    return transaction


def build_pipeline(*, transactions: int, exclusive_gpus: bool, spec: str, run: str) -> Any:
    """Return the compiled-to-be pipeline of `transactions` chained transactions.

    Args:
        transactions: How many transactions one run executes, each from the checkpoint before it.
        exclusive_gpus: Whether capture waits for sampling.
        spec: Default of the parameter `spec`: the specification as one canonical JSON string.
        run: Default of the parameter `run`: the name under which receipts are kept.
    """
    one = _transaction_graph(exclusive_gpus)

    @dsl.pipeline(
        name="longstraw",
        description=f"LongStraw: {transactions} chained GRPO transaction(s) on one LoRA adapter.",
    )
    def longstraw(spec: str = spec, run: str = run, parent_checkpoint: str = "") -> str:
        checkpoint: Any = parent_checkpoint
        previous: Any = None
        for number in range(1, transactions + 1):
            step = one(spec=spec, run=run, transaction=number, parent_checkpoint=checkpoint)
            step.set_display_name(f"transaction {number}")
            if previous is not None:
                step.after(previous)
            previous, checkpoint = step, step.output
        return checkpoint

    return longstraw

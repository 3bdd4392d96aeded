"""The transaction pipeline: nine stages as a graph, chained N times through the checkpoint's descriptor."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.audit_data.component import audit_data
from components.capture_prefix.component import capture_prefix
from components.capture_prefix.on_nodes import capture_prefix_on_nodes
from components.export_lora.component import export_lora
from components.manifest_checkpoint.component import manifest_checkpoint
from components.old_logprobs.component import old_logprobs
from components.old_logprobs.on_nodes import old_logprobs_on_nodes
from components.sample.component import sample
from components.sample.on_nodes import sample_on_nodes
from components.score_rewards.component import score_rewards
from components.train.component import train
from components.train.on_nodes import train_on_nodes
from components.validate_run.component import validate_run
from longstraw_core.spec import canonical_json
from pipelines.pods import PodSettings, RuntimeSettings, apply_pod_settings, placement_of

SPREADABLE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sample": (sample, sample_on_nodes),
    "capture_prefix": (capture_prefix, capture_prefix_on_nodes),
    "old_logprobs": (old_logprobs, old_logprobs_on_nodes),
    "train": (train, train_on_nodes),
}
"""Stages that may have several nodes: the component that runs in its own pod, and the one that launches pods."""


def _transaction_graph(exclusive_gpus: bool, pods: PodSettings) -> Any:
    """Return the one-transaction pipeline; with `exclusive_gpus` capture waits for sampling."""

    @dsl.pipeline(name="transaction", description="One GRPO transaction: one adapter update from long shared prompts.")
    def transaction(
        spec: str,
        run: str,
        transaction: int,
        parent_checkpoint: str,
        control_cpu: str,
        control_memory: str,
        trainer_cpu: str,
        trainer_memory: str,
        trainer_accelerators: str,
        sampler_cpu: str,
        sampler_memory: str,
        sampler_accelerators: str,
        accelerator: str,
        node_selector: dict,  # type: ignore[type-arg]
        tolerations: list,  # type: ignore[type-arg]
        store_secret: str,
        store_config: str,
        pull_secret: str,
    ) -> str:
        identity = {"spec": spec, "run": run, "transaction": transaction}
        policy = {**identity, "parent_checkpoint": parent_checkpoint}
        runtime = RuntimeSettings(
            cpu={"control": control_cpu, "trainer": trainer_cpu, "sampler": sampler_cpu},
            memory={"control": control_memory, "trainer": trainer_memory, "sampler": sampler_memory},
            accelerators={"trainer": trainer_accelerators, "sampler": sampler_accelerators},
            accelerator=accelerator,
            node_selector=node_selector,
            tolerations=tolerations,
            store_secret=store_secret,
            store_config=store_config,
            pull_secret=pull_secret,
        )

        def task(component: Callable[..., Any], arguments: dict[str, Any], **upstream: Any) -> Any:
            receipts = {f"{name}_receipt": stage.outputs["receipt"] for name, stage in upstream.items()}
            created: Any = component(**arguments, **receipts)
            return apply_pod_settings(created, created.name.replace("-", "_"), pods, runtime)

        def spread(stage: str, arguments: dict[str, Any], **upstream: Any) -> Any:
            """A stage that runs in its task's pod, or on several nodes."""
            here, on_nodes = SPREADABLE[stage]
            placement = placement_of(stage, pods.cluster)
            if placement is None:
                return task(here, arguments, **upstream)
            launching = {
                "placement": canonical_json(placement).decode("utf-8"),
                "accelerator": accelerator,
                "pull_secret": pull_secret,
            }
            receipts = {f"{name}_receipt": done.outputs["receipt"] for name, done in upstream.items()}
            return apply_pod_settings(on_nodes(**arguments, **launching, **receipts), stage, pods, runtime)

        stages: dict[str, Any] = {}
        stages["audit_data"] = task(audit_data, policy)
        stages["export_lora"] = task(export_lora, policy, **stages)
        prompts_and_policy = dict(stages)
        stages["sample"] = spread("sample", identity, **prompts_and_policy)
        stages["score_rewards"] = task(
            score_rewards, identity, audit_data=stages["audit_data"], sample=stages["sample"]
        )
        stages["capture_prefix"] = spread("capture_prefix", identity, **prompts_and_policy)
        if exclusive_gpus:
            stages["capture_prefix"].after(stages["sample"])
        stages["old_logprobs"] = spread(
            "old_logprobs", identity, **{name: stage for name, stage in stages.items() if name != "score_rewards"}
        )
        stages["train"] = spread("train", policy, **{name: stage for name, stage in stages.items() if name != "sample"})
        stages["manifest_checkpoint"] = task(manifest_checkpoint, policy, **stages)
        checkpoint = stages["manifest_checkpoint"].outputs["Output"]
        task(validate_run, identity, **stages)
        return checkpoint

    return transaction


def build_pipeline(*, transactions: int, exclusive_gpus: bool, spec: str, run: str, pods: PodSettings) -> Any:
    """Return the compiled-to-be pipeline of `transactions` chained transactions.

    Args:
        transactions: How many transactions one run executes, each from the checkpoint before it.
        exclusive_gpus: Whether capture waits for sampling.
        spec: Default of the parameter `spec`: the specification as one canonical JSON string.
        run: Default of the parameter `run`: the name under which receipts are kept.
        pods: Images, and resources of every role; those that can be given at run time become the defaults.
    """
    one = _transaction_graph(exclusive_gpus, pods)
    cluster = pods.cluster
    control, trainer, sampler = cluster.control, cluster.trainer, cluster.sampler
    node_selector: dict[str, str] = dict(cluster.node_selector)
    tolerations: list[dict[str, Any]] = [item.to_kubernetes() for item in cluster.tolerations]

    @dsl.pipeline(
        name="longstraw",
        description=f"LongStraw: {transactions} chained GRPO transaction(s) on one LoRA adapter.",
    )
    def longstraw(
        spec: str = spec,
        run: str = run,
        parent_checkpoint: str = "",
        control_cpu: str = control.cpu,
        control_memory: str = control.memory,
        trainer_cpu: str = trainer.cpu,
        trainer_memory: str = trainer.memory,
        trainer_accelerators: str = str(trainer.accelerators),
        sampler_cpu: str = sampler.cpu,
        sampler_memory: str = sampler.memory,
        sampler_accelerators: str = str(sampler.accelerators),
        accelerator: str = cluster.accelerator,
        node_selector: dict = node_selector,  # type: ignore[type-arg]
        tolerations: list = tolerations,  # type: ignore[type-arg]
        store_secret: str = cluster.store_secret,
        store_config: str = cluster.store_config,
        pull_secret: str = cluster.pull_secret,
    ) -> str:
        """Run the chained transactions.

        Args:
            spec: The transaction specification as one JSON text. `longstraw compile` fills it in; leave it.
            run: Name of this run in the store. The same name with the same spec continues: finished stages are reused.
            parent_checkpoint: Descriptor (JSON) of the checkpoint to start from. Empty: a fresh adapter.
            control_cpu: CPU request of the stages without accelerators, for instance 1 or 500m.
            control_memory: Memory of the stages without accelerators, for instance 4Gi.
            trainer_cpu: CPU request of a trainer stage.
            trainer_memory: Memory request and limit of a trainer stage.
            trainer_accelerators: Accelerators of a trainer stage's pod; 0 for none.
            sampler_cpu: CPU request of the sampling stage.
            sampler_memory: Memory request and limit of the sampling stage.
            sampler_accelerators: Accelerators of the sampling stage's pod; 0 for none.
            accelerator: Kubernetes resource name of the accelerator, for instance nvidia.com/gpu.
            node_selector: Labels that nodes of trainer and sampler stages must have, as an object.
            tolerations: Taints that trainer and sampler stages tolerate, a list as in a pod.
            store_secret: Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; not needed by pods with a role.
            store_config: Config map with AWS_ENDPOINT_URL_S3, AWS_REGION, LONGSTRAW_S3_PATH_STYLE; may be missing.
            pull_secret: Image pull secret; may be missing where the registry asks for none.
        """
        checkpoint: Any = parent_checkpoint
        previous: Any = None
        for number in range(1, transactions + 1):
            step = one(
                spec=spec,
                run=run,
                transaction=number,
                parent_checkpoint=checkpoint,
                control_cpu=control_cpu,
                control_memory=control_memory,
                trainer_cpu=trainer_cpu,
                trainer_memory=trainer_memory,
                trainer_accelerators=trainer_accelerators,
                sampler_cpu=sampler_cpu,
                sampler_memory=sampler_memory,
                sampler_accelerators=sampler_accelerators,
                accelerator=accelerator,
                node_selector=node_selector,
                tolerations=tolerations,
                store_secret=store_secret,
                store_config=store_config,
                pull_secret=pull_secret,
            )
            step.set_display_name(f"transaction {number}")
            if previous is not None:
                step.after(previous)
            previous, checkpoint = step, step.output
        return checkpoint

    return longstraw

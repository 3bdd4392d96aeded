"""What the three training-side stages share: the policy in gradient mode, and the identity of captured prefixes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from longstraw_core.spec import Prompt
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.stages.context import StageContext

if TYPE_CHECKING:
    from longstraw_core.engine.policy import Policy
    from longstraw_core.resident import PrefixIdentity

POLICY_PREFIX = "policy"
REFERENCE_PREFIX = "reference"


@dataclass(frozen=True)
class PolicyInputs:
    """The prompts of this transaction and the policy that captures and replays them."""

    prompts: tuple[Prompt, ...]
    policy: "Policy"
    snapshot: Path
    snapshot_digest: str
    adapter_digest: str
    rope_scaling: YarnScaling | None
    quantization: Literal["nf4"] | None

    def identity(self, prompt: Prompt, *, reference: bool) -> "PrefixIdentity":
        """Everything that must agree before a stored prefix of `prompt` may be used."""
        from longstraw_core.resident import PrefixIdentity, prompt_token_digest

        with_adapter = self.policy.captures_with_adapter and not reference
        return PrefixIdentity(
            snapshot_digest=self.snapshot_digest,
            adapter_digest=self.adapter_digest if with_adapter else None,
            prompt_digest=prompt_token_digest(prompt.token_ids),
            gradient=self.policy.gradient,
            reference=reference,
            rope_scaling=self.rope_scaling,
            quantization=self.quantization,
        )


def open_policy(context: StageContext) -> PolicyInputs:
    """Verify and load snapshot and adapter, and build the policy."""
    from longstraw_core.engine.policy import Policy
    from longstraw_core.training.model import keeping, load_policy_model

    ranks = context.ranks
    prompts = context.read_records("audit_data", "prompts", Prompt)
    adapter_descriptor = context.input("export_lora", "adapter")
    adapter = context.materialize(adapter_descriptor, "adapter")
    snapshot = context.model_snapshot()
    with context.phase("load model"):
        model = load_policy_model(
            snapshot,
            adapter,
            context.spec.model,
            device=str(ranks.device),
            experts=ranks.experts,
            kept=keeping(context.spec.model, context.spec.layout, ranks.context),
        )
        policy = Policy(
            model,
            context.spec.layout,
            gradient=context.spec.objective.gradient,
            context=ranks.context,
            experts=ranks.experts,
        )
    return PolicyInputs(
        prompts=prompts,
        policy=policy,
        snapshot=snapshot,
        snapshot_digest=context.snapshot_descriptor.digest,
        adapter_digest=adapter_descriptor.digest,
        rope_scaling=context.spec.model.rope_scaling,
        quantization=context.spec.model.quantization,
    )


def needs_reference(context: StageContext) -> bool:
    """Whether the reference (the model with its adapter disabled) must be captured and replayed too."""
    return context.spec.objective.kl_coefficient > 0.0

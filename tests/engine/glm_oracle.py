"""Independent references for `glm_moe_dsa`: transformers' full forward under PEFT. Shares no code with the engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from tests.engine.oracle import VOCABULARY, Batch, full_gradients, output_hooks

ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
INDEX_TOP_K = 24


def tiny_config(**overrides: object) -> GlmMoeDsaConfig:
    """Hidden 48, five layers: index layers 0 and 3, one leading dense layer; every head size differs."""
    fields: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 28,
        "q_lora_rank": 36,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 20,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "index_topk": INDEX_TOP_K,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "indexer_types": ["full", "shared", "shared", "full", "shared"],
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000.0},
    }
    fields |= overrides
    fields.setdefault("mlp_layer_types", None)
    return GlmMoeDsaConfig(**fields)


def tiny_base(*, seed: int = 0, **overrides: object) -> GlmMoeDsaForCausalLM:
    """A random model with norms off one and a correction bias that changes the choice of experts."""
    torch.manual_seed(seed)
    config = tiny_config(**overrides)
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("k_norm.bias"):
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    return model.eval()


def tiny_policy_model(
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION + MLP,
    experts: Sequence[str] = EXPERTS,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> PeftModel:
    """The tiny model under LoRA with non-zero A and B; the names asked for are the modules wrapped."""
    base = tiny_base(seed=seed, **overrides).to(dtype)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(targets),
        target_parameters=list(experts) or None,
    )
    with patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe", lambda *_: None):
        model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def detached_prompt_gradients(model: PeftModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Full sequence whose latents and rope keys are detached on the first P - 1 positions; kv_b_proj is not."""
    cut = len(batch.prompt) - 1

    def detach(_: torch.nn.Module, __: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :cut].detach(), output[:, cut:]], 1)

    with output_hooks(model, ("kv_a_proj_with_mqa",), detach):
        return full_gradients(model, batch)


@contextmanager
def adapter_off_on_prompt(model: PeftModel, prompt_tokens: int) -> Iterator[None]:
    """LoRA masked on the first P - 1 positions of a full sequence, of linear modules and of experts."""
    cut = prompt_tokens - 1

    def mask_linear(module: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, "base_layer"):
            return output
        return torch.cat([module.base_layer(x[..., :cut, :]), output[..., cut:, :]], -2)

    def mask_experts(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        base = module.get_base_layer()
        return torch.cat([base(*(argument[:cut] for argument in inputs)), output[cut:]])

    handles = [
        module.register_forward_hook(mask_experts)
        for name, module in model.named_modules()
        if name.endswith("mlp.experts") and hasattr(module, "base_layer")
    ]
    try:
        with output_hooks(model, ATTENTION + MLP, mask_linear):
            yield
    finally:
        for handle in handles:
            handle.remove()


class Choices:
    """Token selections and expert choices that transformers made, by module and absolute position."""

    def __init__(self) -> None:
        self.by_module: dict[int, torch.Tensor] = {}

    def rows(self, module: object, start: int, length: int) -> torch.Tensor:
        return self.by_module[id(module)][start : start + length].long()


@contextmanager
def recorded_choices(model: PeftModel) -> Iterator[Choices]:
    """Record what indexers and routers choose in full forwards; the last forward counts."""
    choices = Choices()

    def keep(module: torch.nn.Module, _: object, output: object) -> None:
        chosen = output[0] if isinstance(output, torch.Tensor) else output[2]  # type: ignore[index]
        choices.by_module[id(module)] = chosen

    handles = [
        module.register_forward_hook(keep)
        for name, module in model.named_modules()
        if name.endswith((".indexer", ".mlp.gate"))
    ]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def engine_pinned_to(choices: Choices) -> Iterator[None]:
    """Make the engine choose what transformers chose wherever it decides freely.

    Two fp32 computations in another order of summation may differ by an ulp; where two scores are that close, they
    rank them differently, and one flipped token or expert changes a gradient by 1e-4 to 1e-2. That is no error of
    either, so parity at lengths where such near-ties occur is measured with equal choices. What the engine records
    and reuses stays its own code. A pinned selection follows from no score, so it must be recorded as positions.
    """
    from longstraw_core.mixers import latent_attention, routed_experts
    from longstraw_core.mixers.index_selection import Cut

    select, feed_forward = latent_attention.LatentAttention._select, routed_experts.RoutedExperts.feed_forward
    current: dict[str, torch.Tensor] = {}
    no_cut = Cut(torch.empty(0), torch.empty(0, dtype=torch.int32))

    def pinned_select(self: object, x: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, segment, state):  # type: ignore[no-untyped-def]
        start = segment.ownership.first
        first = min(max(INDEX_TOP_K - start, 0), segment.length)
        rows = choices.rows(self._module.indexer, start + first, segment.length - first)  # type: ignore[attr-defined]
        current["selected"] = rows.sort(-1).values
        return select(self, x, q, keys, segment, state)  # type: ignore[arg-type]

    def pinned_feed_forward(self: object, x: torch.Tensor, segment, state):  # type: ignore[no-untyped-def]
        current["experts"] = choices.rows(self._module.gate, segment.ownership.first, segment.length)  # type: ignore[attr-defined]
        return feed_forward(self, x, segment, state)  # type: ignore[arg-type]

    with (
        patch.object(latent_attention.LatentAttention, "_select", pinned_select),
        patch.object(latent_attention, "select_tokens", lambda *_, **__: (current["selected"], no_cut)),
        patch.object(latent_attention, "select_across_ranks", lambda *_, **__: (current["selected"], no_cut, None)),
        patch.object(routed_experts.RoutedExperts, "feed_forward", pinned_feed_forward),
        patch.object(routed_experts.RoutedExperts, "_choose", lambda *_: current["experts"]),
    ):
        yield

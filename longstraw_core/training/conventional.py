"""The oracle: conventional GRPO gradients from transformers + PEFT and plain autograd; shares no code with the engine.

Every response is one full sequence (prompt and response) through the model's own forward, as TRL's trainer does it.
The two other gradient modes are the same full sequence with forward hooks: `stopgrad` detaches what writes prompt
state, `response_adapter` masks LoRA, both on the first P - 1 positions. Nothing here may import `engine`, `mixers`
or `resident`: what this module and the engine agree on was computed twice.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import peft.utils.transformers_weight_conversion as peft_conversion
import torch
from peft import LoraConfig, get_peft_model
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import TargetPreset

LORA_RANK = 8
_LORA_B_STD = 0.05
_INITIAL_STD = 0.08


@dataclass(frozen=True)
class ModelSize:
    """Size of a random model; heads and head sizes are fixed per family."""

    layers: int = 8
    hidden: int = 64
    vocabulary: int = 512
    positions: int = 65536
    selected_tokens: int = 256
    """GLM only: tokens that sparse attention keeps."""


@dataclass(frozen=True)
class ConventionalBatch:
    """One prompt, its responses and their advantages."""

    prompt: list[int]
    responses: list[list[int]]
    advantages: list[float]


@dataclass(frozen=True)
class ConventionalGradients:
    """Gradients by PEFT's state-dict names, log-probabilities of every response, and the loss."""

    gradients: dict[str, torch.Tensor]
    logprobs: list[torch.Tensor]
    loss: float


@dataclass(frozen=True)
class _Recipe:
    """What the oracle must know of a family."""

    build: Callable[[ModelSize], Any]
    attention: tuple[str, ...]
    """Linear modules that preset `attention` adapts."""
    state_writers: tuple[str, ...]
    """Modules whose outputs become prompt state, and nothing but prompt state does."""
    experts: tuple[str, ...] = ()
    """Fused parameters of the routed experts, that preset `all` adapts too."""


def _qwen3_5(size: ModelSize) -> Any:
    config = Qwen3_5TextConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=size.positions,
        initializer_range=_INITIAL_STD,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # decays of realistic size
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.02, 1.0).log())
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.empty_like(parameter).uniform_(-5.0, -1.0))
    return model


def _glm_moe_dsa(size: ModelSize) -> Any:
    config = GlmMoeDsaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        moe_intermediate_size=32,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        routed_scaling_factor=2.5,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=24,
        v_head_dim=32,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        index_topk=size.selected_tokens,
        index_head_dim=32,
        index_n_heads=32,  # fewer give exact zeros that tie (facts/architectures.md, section 2)
        index_topk_freq=4,  # type: ignore[call-arg]  # read from keyword arguments
        index_skip_topk_offset=3,  # type: ignore[call-arg]
        max_position_embeddings=size.positions,
        initializer_range=_INITIAL_STD,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 8_000_000.0},
    )
    return GlmMoeDsaForCausalLM(config)


_GDN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_RECIPES = {
    "qwen3_5_text": _Recipe(
        _qwen3_5,
        attention=("q_proj", "k_proj", "v_proj", "o_proj", *_GDN),
        state_writers=("in_proj_qkv", "in_proj_a", "in_proj_b", "k_proj", "v_proj"),
    ),
    "glm_moe_dsa": _Recipe(
        _glm_moe_dsa,
        attention=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        state_writers=("kv_a_proj_with_mqa",),
        experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
}


def random_policy_model(
    family: str,
    size: ModelSize,
    *,
    targets: TargetPreset = "all",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a random model of `family` under LoRA with non-zero A and B, so that every parameter has a gradient.

    `attention+mlp` adds the dense and shared-expert networks, `all` the routed experts besides.
    """
    recipe = _RECIPES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = recipe.build(size).to(dtype)
        config = LoraConfig(
            r=LORA_RANK,
            lora_alpha=2 * LORA_RANK,
            lora_dropout=0.0,
            bias="none",
            target_modules=[*recipe.attention, *(() if targets == "attention" else _MLP)],
            target_parameters=[*recipe.experts] if targets == "all" and recipe.experts else None,
        )
        with warnings.catch_warnings(), _names_as_given():
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape) * _LORA_B_STD)
    return model.eval()


@contextlib.contextmanager
def _names_as_given() -> Iterator[None]:
    """PEFT 0.21 reads gate/up/down_proj of a mixture model as the fused parameters of all experts; here they are not.

    The dense and shared-expert networks of a mixture model have linear modules of these names, which are meant.
    """
    converted = peft_conversion._convert_peft_config_moe
    peft_conversion._convert_peft_config_moe = lambda *_: None
    try:
        yield
    finally:
        peft_conversion._convert_peft_config_moe = converted


def random_batch(
    vocabulary: int, prompt_tokens: int, response_tokens: Sequence[int], *, seed: int
) -> ConventionalBatch:
    """Random token ids and standardised advantages (1.0 for a group of one)."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, vocabulary, (count,), generator=generator).tolist()

    rewards = torch.randn(len(response_tokens), generator=generator)
    spread = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    advantages = [1.0] if len(response_tokens) == 1 else spread.tolist()
    return ConventionalBatch(tokens(prompt_tokens), [tokens(count) for count in response_tokens], advantages)


def checkpoint_activations(model: Any) -> None:
    """Switch on transformers' own gradient checkpointing (it needs training mode; dropout is 0)."""
    model.train()
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


def response_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [R] of a response from transformers' forward over prompt and response."""
    device = next(model.parameters()).device
    ids_1T = torch.tensor([[*prompt, *response]], device=device)
    logits_RV = model(input_ids=ids_1T[:, :-1], use_cache=False, logits_to_keep=len(response)).logits[0]
    return torch.log_softmax(logits_RV.float(), -1).gather(-1, ids_1T[0, len(prompt) :, None])[:, 0]


def accumulate_conventional(
    model: Any, batch: ConventionalBatch, *, clip: float = 0.2
) -> tuple[list[torch.Tensor], float]:
    """Add the on-policy GRPO gradient (sequence mean, then mean over the group) to `.grad`, response by response."""
    logprobs: list[torch.Tensor] = []
    total = 0.0
    for response, advantage in zip(batch.responses, batch.advantages, strict=True):
        logprobs_R = response_logprobs(model, batch.prompt, response)
        ratio_R = torch.exp(logprobs_R - logprobs_R.detach())
        clipped_R = ratio_R.clamp(1.0 - clip, 1.0 + clip)
        loss = -torch.minimum(ratio_R * advantage, clipped_R * advantage).mean() / len(batch.responses)
        loss.backward()
        logprobs.append(logprobs_R.detach())
        total += float(loss.detach())
    return logprobs, total


def conventional_gradients(
    family: str, model: Any, batch: ConventionalBatch, *, gradient: GradientMode
) -> ConventionalGradients:
    """Return the gradient that `gradient` names, from full sequences; the model's own gradients are left clear."""
    recipe = _RECIPES[family]
    cut = len(batch.prompt) - 1
    hooks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if gradient == "stopgrad":
        hooks = _hooked(model, lambda name, _: _last(name) in recipe.state_writers, lambda _, __, y: _detached(y, cut))
    elif gradient == "response_adapter":
        hooks = _hooked(model, _is_adapted, lambda module, inputs, y: _masked(module, inputs, y, cut))
    model.zero_grad(set_to_none=True)
    with hooks:
        logprobs, loss = accumulate_conventional(model, batch)
    result = ConventionalGradients(take_gradients(model), logprobs, loss)
    model.zero_grad(set_to_none=True)
    return result


def take_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all gradients in fp32 by PEFT's state-dict names; zeros where nothing arrived."""
    return {
        name.replace(".default.", "."): (
            torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.grad is None
            else parameter.grad.detach().float().clone()
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _detached(output_1TC: torch.Tensor, cut: int) -> torch.Tensor:
    return torch.cat([output_1TC[:, :cut].detach(), output_1TC[:, cut:]], 1)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _is_adapted(name: str, module: torch.nn.Module) -> bool:
    """Whether PEFT wrapped this; of nested wrappers (two parameters of one module) the outer one counts."""
    return hasattr(module, "base_layer") and _last(name) != "base_layer"


def _masked(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, cut: int) -> torch.Tensor:
    """`output` with the base's own on the first `cut` tokens; routed experts see tokens in their first dimension."""
    base, tokens = module.get_base_layer(), output.dim() - 2
    on_prompt = base(*(tensor.narrow(tensor.dim() - 2, 0, cut) for tensor in inputs))
    return torch.cat([on_prompt, output.narrow(tokens, cut, output.shape[tokens] - cut)], tokens)


@contextlib.contextmanager
def _hooked(
    model: Any,
    applies: Callable[[str, torch.nn.Module], bool],
    change: Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Replace the outputs of modules for which applies(full name, module) by change(module, inputs, output)."""
    handles = [module.register_forward_hook(change) for name, module in model.named_modules() if applies(name, module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""Independent references: transformers' full forward under PEFT, plain autograd. Shares no code with the engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

LINEARS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
STATE_WRITERS = ("in_proj_qkv", "in_proj_a", "in_proj_b", "k_proj", "v_proj")
VOCABULARY = 211


def tiny_config(layer_types: Sequence[str], **overrides: object) -> Qwen3_5TextConfig:
    """Hidden 48; grouped heads in both mixers; head sizes that differ, so that a transposition cannot go unseen."""
    fields: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return Qwen3_5TextConfig(**(fields | overrides))


def tiny_base(
    layer_types: Sequence[str] = ("linear_attention", "full_attention", "linear_attention", "full_attention"),
    *,
    seed: int = 0,
    **overrides: object,
) -> Qwen3_5ForCausalLM:
    """A random model with decays, norms and convolutions of realistic size, so that rounding is not amplified."""
    torch.manual_seed(seed)
    config = tiny_config(layer_types, **overrides)
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.05, 1.0).log())
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.empty_like(parameter).uniform_(-4.0, -1.0))
            elif name.endswith("conv1d.weight"):
                parameter.normal_(std=0.6)
            elif name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_policy_model(
    layer_types: Sequence[str] = ("linear_attention", "full_attention", "linear_attention", "full_attention"),
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = LINEARS,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> PeftModel:
    """The tiny model under LoRA with non-zero A and B, so that every parameter has a gradient."""
    base = tiny_base(layer_types, seed=seed, **overrides).to(dtype)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none", target_modules=list(targets))
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


@dataclass(frozen=True)
class Batch:
    """One prompt with its responses and advantages."""

    prompt: list[int]
    responses: list[list[int]]
    advantages: list[float]


def random_batch(prompt_tokens: int, response_lengths: Sequence[int], *, seed: int = 3) -> Batch:
    """Random token ids and standardised advantages (1.0 for a group of one)."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    rewards = torch.randn(len(response_lengths), generator=generator)
    spread = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    advantages = [1.0] if len(response_lengths) == 1 else spread.tolist()
    return Batch(tokens(prompt_tokens), [tokens(length) for length in response_lengths], advantages)


def surrogate(logprobs_R: torch.Tensor, advantage: float, group: int) -> torch.Tensor:
    """An on-policy GRPO term: sequence mean of -ratio * advantage, over the group."""
    ratio_R = torch.exp(logprobs_R - logprobs_R.detach())
    return -(ratio_R * advantage).mean() / group


def full_logits(model: PeftModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Logits [R, V] that predict the response tokens, from transformers' forward over the whole sequence."""
    ids = torch.tensor([[*prompt, *response]])
    return model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]


def full_logprobs(
    model: PeftModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [R] of the response from the full forward."""
    logits_RV = full_logits(model, prompt, response).float() / temperature
    return torch.log_softmax(logits_RV, -1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def full_gradients(model: PeftModel, batch: Batch, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Conventional gradient: full sequence, plain autograd, one response per backward."""
    model.zero_grad(set_to_none=True)
    for response, advantage in zip(batch.responses, batch.advantages, strict=True):
        logprobs_R = full_logprobs(model, batch.prompt, response, temperature)
        surrogate(logprobs_R, advantage, len(batch.responses)).backward()
    return gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameter gradients; zeros where nothing arrived."""
    return {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@contextmanager
def output_hooks(
    model: torch.nn.Module,
    names: Sequence[str],
    change: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Replace the outputs of modules with these last names by change(module, input, output)."""
    handles = [
        module.register_forward_hook(lambda module, inputs, output: change(module, inputs[0], output))
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def detached_prompt_gradients(model: PeftModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Full sequence in which everything that writes prompt state is detached on the first P - 1 positions."""
    cut = len(batch.prompt) - 1

    def detach(_: torch.nn.Module, __: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :cut].detach(), output[:, cut:]], 1)

    with output_hooks(model, STATE_WRITERS, detach):
        return full_gradients(model, batch)


@contextmanager
def adapter_off_on_prompt(model: PeftModel, prompt_tokens: int) -> Iterator[None]:
    """LoRA masked on the first P - 1 positions of a full sequence."""
    cut = prompt_tokens - 1

    def mask(module: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([module.base_layer(x[:, :cut]), output[:, cut:]], 1)

    with output_hooks(model, LINEARS, lambda m, x, y: mask(m, x, y) if hasattr(m, "base_layer") else y):
        yield


def relative_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Relative L2 error over all parameters together."""
    assert ours.keys() == reference.keys()
    difference = sum(float((ours[name].double() - reference[name].double()).pow(2).sum()) for name in reference)
    return (difference / sum(float(value.double().pow(2).sum()) for value in reference.values())) ** 0.5


def worst_relative_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest relative L2 error of any one parameter.

    A parameter whose true gradient is zero (the key of a token that attends only to itself) must have none to 1e-6
    of the whole gradient.
    """
    assert ours.keys() == reference.keys()
    whole = sum(float(value.double().pow(2).sum()) for value in reference.values()) ** 0.5
    worst = 0.0
    for name, expected in reference.items():
        norm = float(expected.double().norm())
        error = float((ours[name].double() - expected.double()).norm())
        if norm <= 1e-7 * whole:
            assert error <= 1e-6 * whole, name
        else:
            worst = max(worst, error / norm)
    return worst

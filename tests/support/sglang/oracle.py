"""What transformers and PEFT say: log-probabilities of a response by one ordinary forward pass."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from longstraw_core.rollout.reply import Wanted
from longstraw_core.spec import Prompt, Rollout
from longstraw_core.spec.transaction import LoraSpec, ModelSpec
from longstraw_core.training.lora import inject_adapter, save_adapter, trainable_parameters
from longstraw_core.training.model import load_base_model

SERVED = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def logprobs(model: Any, rollout: Rollout, *, adapter: bool = True) -> torch.Tensor:
    """Log-probabilities of a rollout's tokens, [T], under softmax(logits / temperature)."""
    ids_1T = torch.tensor([[*rollout.prompt_token_ids, *rollout.token_ids]])
    first = len(rollout.prompt_token_ids) - 1
    with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
        logits_TV = model(input_ids=ids_1T[:, :-1], use_cache=False).logits[0, first:].float()
    chosen_T1 = ids_1T[0, first + 1 :, None]
    return torch.log_softmax(logits_TV / rollout.temperature, dim=-1).gather(1, chosen_T1).squeeze(1)


def largest_difference(model: Any, rollouts: Sequence[Rollout], *, adapter: bool = True) -> float:
    """Largest |Δ log-prob| over all tokens of rollouts."""
    return max(
        float((logprobs(model, rollout, adapter=adapter) - torch.tensor(rollout.logprobs)).abs().max())
        for rollout in rollouts
    )


def fill(model: PeftModel, seed: int, size: float = 0.1) -> None:
    """Give every adapter weight a random value, so that the adapter changes every output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def hybrid_adapter(snapshot: Path, directory: Path, *, targets: tuple[str, ...] = SERVED, seed: int = 1) -> PeftModel:
    """Write a random adapter of the hybrid to `directory` and return the adapted model."""
    spec = ModelSpec(snapshot=str(snapshot), family="qwen3_5_text", dtype="float32")
    model = inject_adapter(load_base_model(snapshot, spec), LoraSpec(rank=4, alpha=8.0, targets=targets), seed=0)
    fill(model, seed)
    save_adapter(model, directory)
    return model


def prompt_of(length: int, name: str = "p0", vocabulary: int = 300) -> Prompt:
    """A prompt of random token ids."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
    return Prompt(prompt_id=name, token_ids=tuple(ids), ground_truth="1", data_source="math_dapo", row=0)


def wanted(prompt: Prompt, index: int = 0, **fields: Any) -> Wanted:
    """A request for a response of at most twelve tokens."""
    defaults: dict[str, Any] = {
        "seed": 7,
        "max_tokens": 12,
        "temperature": 0.7,
        "end_tokens": (388,),  # what the small models end with: the server knows it from the snapshot
        "vocabulary": 512,
        "adapter": True,
    }
    return Wanted(prompt=prompt, index=index, **{**defaults, **fields})

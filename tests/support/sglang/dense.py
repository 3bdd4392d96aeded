"""A random dense Qwen3 and random adapters of it, for the tests with the real server."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM


def write_dense_model(directory: Path, untrained_snapshot: Path) -> Path:
    """A random dense Qwen3 with the tokenizer of the tiny model and 256 positions."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=388,
        pad_token_id=386,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=388, pad_token_id=386)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(untrained_snapshot / name, directory / name)
    return directory


PARTIAL = ("k_proj", "v_proj", "up_proj", "o_proj")
"""Targets whose neighbours the server needs too: q_proj and gate_proj."""


def adapted(model: Any, targets: str | Sequence[str] = PARTIAL, **fields: Any) -> PeftModel:
    """A model with a random adapter; `fields` are further ones of PEFT's configuration."""
    names = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False, **fields
    )
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in sorted(peft.named_parameters()):
            if parameter.requires_grad and parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return peft.eval()

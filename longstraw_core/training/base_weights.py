"""Loads a snapshot's weights: each rank reads its own experts' slices, everything else, and nothing of the others'.

Every tensor goes straight from its place in the safetensors files to the device, in the model's dtype.
"""

import math
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from longstraw_core.mixers.exchange.expert_shard import held_experts, is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.training.weight_files import Run, WeightFiles

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What the fused parameters of a model are in a file with a tensor per expert: rows of the parts, in this order."""


def load_weights(snapshot: Path, config: Any, *, dtype: torch.dtype, device: str, experts: RankGroup) -> Any:
    """Return the causal language model with this rank's experts and everything else, frozen.

    Args:
        snapshot: directory of a Hugging Face snapshot; of a multimodal one the language model is read.
        config: its configuration.
        dtype: of all weights but those that the model keeps in fp32.
        device: where the weights go.
        experts: the ranks that share the experts.

    Raises:
        IntegrityError: a tensor is missing, unreadable or has another shape than the configuration says.
        SpecError: the experts cannot be divided evenly.
    """
    config = config.get_text_config()
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if config.tie_word_embeddings else set()
    stored = set(model.state_dict())  # buffers that are computed, such as rotary frequencies, are not in files
    source = WeightSource(snapshot, config, experts)
    for name, meta in [*model.named_parameters(), *model.named_buffers()]:
        if name in tied or name not in stored:
            continue
        runs, shape = source.locate(name, tuple(meta.shape))
        wanted = torch.float32 if any(f".{pattern}." in f".{name}." for pattern in keep) else dtype
        tensor = torch.empty(shape, dtype=wanted, device=device)
        source.files.copy_elements(runs, 0, tensor.view(-1))
        _assign(model, name, tensor, parameter=isinstance(meta, nn.Parameter))
    source.files.close()
    model.tie_weights()
    return model.to(device)


class WeightSource:
    """Where a snapshot keeps what a rank holds of every parameter.

    Args:
        snapshot: directory of the snapshot.
        config: configuration of the language model.
        experts: the ranks that share the experts.

    Raises:
        IntegrityError: there is no readable safetensors file or index.
        SpecError: the experts cannot be divided evenly.
    """

    def __init__(self, snapshot: Path, config: Any, experts: RankGroup) -> None:
        self.files = WeightFiles(snapshot)
        self._snapshot = snapshot
        self._held = held_experts(getattr(config, "n_routed_experts", 0) or 0, experts)

    def locate(self, name: str, shape: tuple[int, ...]) -> tuple[list[Run], tuple[int, ...]]:
        """Return the stored elements of this rank's part of a parameter, in order, and the part's shape.

        Args:
            name: the parameter's name in the model.
            shape: its whole shape, with the experts of all ranks.

        Raises:
            IntegrityError: a tensor is missing, unreadable or has another shape than `shape` says.
        """
        stored = self._stored_name(name)
        if not is_expert_parameter(name):
            self._check(stored, shape)
            return [Run(stored, 0, math.prod(shape))], shape
        part = (len(self._held), *shape[1:])
        if stored in self.files:
            self._check(stored, shape)
            expert = math.prod(shape[1:])
            return [Run(stored, self._held.start * expert, math.prod(part))], part
        prefix, fused = stored.rsplit(".", 1)
        parts = _PARTS[fused]
        each = (shape[1] // len(parts), shape[2])
        names = [f"{prefix}.{expert}.{piece}.weight" for expert in self._held for piece in parts]
        for piece in names:
            self._check(piece, each)
        return [Run(piece, 0, math.prod(each)) for piece in names], part

    def _check(self, stored: str, expected: tuple[int, ...]) -> None:
        found = self.files.shape(stored)
        if found != expected:
            raise IntegrityError(
                f"model.snapshot: tensor {stored} in {self._snapshot} has shape {found}, "
                f"its config.json says {expected}"
            )

    def _stored_name(self, name: str) -> str:
        """The name in the files: a multimodal snapshot keeps the language model beside others."""
        wrapped = name.replace("model.", "model.language_model.", 1)
        return wrapped if name not in self.files and wrapped in self.files else name


def _assign(model: nn.Module, name: str, tensor: torch.Tensor, *, parameter: bool) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if parameter:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)

"""Loads a snapshot whose routed experts are shared: each rank reads its own experts' slices and nothing of the others'.

Every tensor goes straight from its place in the safetensors file to the device, in the model's dtype; a file is mapped
for one tensor at a time, so that host memory never holds more than the rank's share and one tensor.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from longstraw_core.mixers.exchange.expert_shard import held_experts, is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.errors import IntegrityError

_INDEX = "model.safetensors.index.json"
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What the fused parameters of a model are in a file with a tensor per expert: rows of the parts, in this order."""


def load_held_weights(snapshot: Path, config: Any, *, dtype: torch.dtype, device: str, experts: RankGroup) -> Any:
    """Return the model with this rank's experts and everything else.

    Raises:
        IntegrityError: a tensor is missing, unreadable or has another shape than the configuration says.
        SpecError: the experts cannot be divided evenly.
    """
    held = held_experts(config.n_routed_experts, experts)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    files = _files_of_tensors(snapshot)
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if config.tie_word_embeddings else set()
    stored = set(model.state_dict())  # buffers that are computed, such as rotary frequencies, are not in files
    for name, meta in [*model.named_parameters(), *model.named_buffers()]:
        if name in tied or name not in stored:
            continue
        wanted = torch.float32 if any(f".{pattern}." in f".{name}." for pattern in keep) else dtype
        shape = tuple(meta.shape)
        if is_expert_parameter(name):
            shape = (len(held), *shape[1:])
            tensor = _expert_tensor(snapshot, files, name, held, wanted, device)
        else:
            tensor = _tensor(snapshot, files, name, None, wanted, device)
        if tuple(tensor.shape) != shape:
            raise IntegrityError(
                f"model.snapshot: tensor {name} in {snapshot} has shape {tuple(tensor.shape)}, "
                f"its config.json says {shape}"
            )
        _assign(model, name, tensor, parameter=isinstance(meta, nn.Parameter))
    model.tie_weights()
    return model.to(device)


def _files_of_tensors(snapshot: Path) -> dict[str, str]:
    index = snapshot / _INDEX
    try:
        if index.is_file():
            return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        with safe_open(snapshot / "model.safetensors", framework="pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise IntegrityError(f"model.snapshot: {snapshot} cannot be loaded: {error}") from error


def _tensor(
    snapshot: Path, files: dict[str, str], name: str, rows: range | None, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Read one tensor, or consecutive rows of it, to the device."""
    if name not in files:
        raise IntegrityError(f"model.snapshot: {snapshot} lacks tensor {name}")
    try:
        with safe_open(snapshot / files[name], framework="pt") as file:
            stored = file.get_slice(name)
            part = stored[:] if rows is None else stored[rows.start : rows.stop]
            return part.to(device=device, dtype=dtype, copy=True)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"model.snapshot: tensor {name} in {snapshot} cannot be read: {error}") from error


def _expert_tensor(
    snapshot: Path, files: dict[str, str], name: str, held: range, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Read the held experts of a fused parameter, whether the file holds it fused or expert by expert."""
    if name in files:
        return _tensor(snapshot, files, name, held, dtype, device)
    prefix, fused = name.rsplit(".", 1)
    whole: torch.Tensor | None = None
    for place, expert in enumerate(held):
        row = 0
        for part in _PARTS[fused]:
            tensor = _tensor(snapshot, files, f"{prefix}.{expert}.{part}.weight", None, dtype, device)
            if whole is None:
                rows = tensor.shape[0] * len(_PARTS[fused])
                whole = torch.empty((len(held), rows, tensor.shape[1]), dtype=dtype, device=device)
            whole[place, row : row + tensor.shape[0]] = tensor
            row += tensor.shape[0]
    if whole is None:
        raise AssertionError("held_experts never returns an empty range")
    return whole


def _assign(model: nn.Module, name: str, tensor: torch.Tensor, *, parameter: bool) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if parameter:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)

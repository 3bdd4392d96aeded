"""Loads a snapshot's weights: each rank reads its own experts' slices, everything else, and nothing of the others'.

Every tensor goes straight from its place in the safetensors files to the device, in the model's dtype. Matrices of
decoder layers that are kept in shares are read share by share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from longstraw_core.mixers.exchange.expert_shard import held_experts, is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.layer_weights import (
    FlatLayout,
    KeptShare,
    LayerWeights,
    PlainShare,
    absent_weight,
    decoder_layers,
    frozen_matrices,
    keep_on_use,
    share_of,
)
from longstraw_core.mixers.nf4 import Nf4Share
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.training.weight_files import Run, WeightFiles

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What the fused parameters of a model are in a file with a tensor per expert: rows of the parts, in this order."""
_WEIGHT_KINDS = ("F64", "F32", "F16", "BF16")
"""Types that are weights as they are. Eight bits and fewer are codes that need a scale, and would load as nonsense."""


@dataclass(frozen=True)
class Keeping:
    """How the decoder layers' frozen matrices are kept when they are whole only on use."""

    group: RankGroup
    """The ranks that keep a share each; the context-parallel ones, or this one alone."""
    nf4: bool


def load_weights(
    snapshot: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: str,
    experts: RankGroup,
    keeping: Keeping | None = None,
) -> Any:
    """Return the causal language model with this rank's experts and everything else, frozen.

    Args:
        snapshot: directory of a Hugging Face snapshot; of a multimodal one the language model is read.
        config: its configuration.
        dtype: of all weights but those that the model keeps in fp32.
        device: where the weights go.
        experts: the ranks that share the experts.
        keeping: None for weights that are whole all the time.

    Raises:
        IntegrityError: a tensor is missing, unreadable, no floating-point weights, or has another shape than the
            configuration says.
        SpecError: the experts cannot be divided evenly, or NF4 is not possible here.
    """
    config = config.get_text_config()
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if config.tie_word_embeddings else set()
    stored = set(model.state_dict())  # buffers that are computed, such as rotary frequencies, are not in files
    source = WeightSource(snapshot, config, experts)
    on_use: set[str] = set()
    if keeping is not None:
        on_use = _load_layers_on_use(model, source, keeping, dtype=dtype, device=device, keep=keep, experts=experts)
    for name, meta in [*model.named_parameters(), *model.named_buffers()]:
        if name in tied or name not in stored or name in on_use:
            continue
        runs, shape = source.locate(name, tuple(meta.shape))
        wanted = torch.float32 if _is_kept_in_fp32(name, keep) else dtype
        tensor = torch.empty(shape, dtype=wanted, device=device)
        source.files.copy_elements(runs, 0, tensor.view(-1))
        _assign(model, name, tensor, parameter=isinstance(meta, nn.Parameter))
    source.files.close()
    model.tie_weights()
    for name, buffer in model.named_buffers():  # those that were computed
        if buffer.device.type != torch.device(device).type:
            _assign(model, name, buffer.to(device), parameter=False)
    return model


def _is_kept_in_fp32(name: str, keep: tuple[str, ...]) -> bool:
    return any(f".{pattern}." in f".{name}." for pattern in keep)


def _load_layers_on_use(
    model: Any,
    source: "WeightSource",
    keeping: Keeping,
    *,
    dtype: torch.dtype,
    device: str,
    keep: tuple[str, ...],
    experts: RankGroup,
) -> set[str]:
    """Load this rank's shares of the decoder layers' matrices; return the full names of these."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: list[list[LayerWeights]] = []
    done: set[str] = set()
    for layer in decoder_layers(model):
        matrices = [names[id(p)] for p in frozen_matrices(layer, dtype=dtype, quantised=keeping.nf4).values()]
        matrices = [name for name in matrices if not _is_kept_in_fp32(name, keep)]
        runs = [(keeping.group, matrices)]
        if keeping.group.size > 1 and experts.size > 1:  # each rank's experts are its own
            runs = [(keeping.group, [name for name in matrices if not is_expert_parameter(name)])]
            if keeping.nf4:
                runs.append((ALONE, [name for name in matrices if is_expert_parameter(name)]))
        runs = [(group, run) for group, run in runs if run]
        layers.append(
            [_load_run(model, source, run, group, keeping, dtype=dtype, device=device) for group, run in runs]
        )
        done.update(name for _, run in runs for name in run)
    keep_on_use(model, layers)
    return done


def _load_run(
    model: Any,
    source: "WeightSource",
    names: Sequence[str],
    group: RankGroup,
    keeping: Keeping,
    *,
    dtype: torch.dtype,
    device: str,
) -> LayerWeights:
    """Load this rank's share of some matrices of a layer."""
    located = [source.locate(name, tuple(model.get_parameter(name).shape)) for name in names]
    layout = FlatLayout.of([shape for _, shape in located], group.size)
    share = share_of(
        layout,
        group.rank,
        lambda matrix, first, out: source.files.copy_elements(located[matrix][0], first, out),
        like=torch.empty(0, dtype=dtype, device=device),
    )
    kept: KeptShare = Nf4Share(share) if keeping.nf4 else PlainShare(share)
    for name, (_, shape) in zip(names, located, strict=True):
        _assign(model, name, absent_weight(shape, dtype, device), parameter=True)
    return LayerWeights([model.get_parameter(name) for name in names], layout, kept, group)


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
            IntegrityError: a tensor is missing, unreadable, no floating-point weights, or has another shape than
                `shape` says.
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
        kind = self.files.dtype(stored)
        if kind not in _WEIGHT_KINDS:
            raise IntegrityError(
                f"model.snapshot: tensor {stored} in {self._snapshot} is stored as {kind}, weights must be "
                f"{', '.join(_WEIGHT_KINDS)}; use the snapshot in bfloat16 or float32"
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
        module._buffers[leaf] = tensor  # a buffer that is not stored must not become one that is

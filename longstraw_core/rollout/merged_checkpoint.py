"""Writes a copy of a model snapshot with a LoRA adapter added into its weights, one weight file at a time.

Names, shards and everything beside the weights stay as they are in the snapshot, so whatever loads the snapshot loads
the copy. Each changed tensor is computed in fp32 and rounded once to the snapshot's dtype.
Shapes: E experts, r rank, I intermediate and H hidden size.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from longstraw_core.rollout.adapter_rules import CONFIG_NAME, UNSUPPORTED, WEIGHTS_NAME
from longstraw_core.rollout.snapshot_tensors import layer_key, layer_shapes, shard_names
from longstraw_core.spec import IntegrityError, SpecError

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>[0-9]+)\.(?P<name>gate_proj|up_proj|down_proj)\.weight$")
_NOT_PLAIN_LORA = tuple(key for key, _ in UNSUPPORTED if key != "exclude_modules")  # the tensors say what is adapted


@dataclass(frozen=True)
class _Change:
    """What is added to one tensor: scaling · B A, with B [out, r] and A [r, in], or [E, out, r] and [E, r, in]."""

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float

    def delta(self) -> torch.Tensor:
        return self.lora_B.float() @ self.lora_A.float() * self.scaling


def write_merged_checkpoint(snapshot: Path, adapter: Path, destination: Path) -> int:
    """Write snapshot + adapter into `destination`, which must not exist; return how many tensors were changed.

    Args:
        snapshot: Hugging Face snapshot; experts may be stored one by one or fused.
        adapter: PEFT directory; modules and `target_parameters` of routed experts.

    Raises:
        SpecError: the adapter is not plain LoRA, or adapts something that the snapshot does not have.
        IntegrityError: a weight file cannot be read, or a merged value is not finite.
    """
    changes = _changes(adapter, layer_shapes(snapshot))
    unused = set(changes)
    destination.mkdir(parents=True)
    shards = set(shard_names(snapshot))
    for entry in sorted(snapshot.iterdir()):
        if entry.is_file() and entry.name not in shards and entry.suffix != ".safetensors":
            shutil.copyfile(entry, destination / entry.name)
    changed = 0
    for shard in sorted(shards):
        path = snapshot / shard
        merged: dict[str, torch.Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_tensor(name)
                    delta, key = _delta_of(name, changes)
                    if delta is not None and key is not None:
                        unused.discard(key)
                        tensor = _added(tensor, delta, f"{path}: tensor {name}")
                        changed += 1
                    merged[name] = tensor
        except (OSError, SafetensorError) as error:
            raise IntegrityError(f"{path}: not a readable safetensors file: {error}") from error
        save_file(merged, destination / shard, metadata=metadata)
    if unused:
        raise SpecError(f"{adapter}: {snapshot} has no weight for {', '.join(sorted(unused))}; nothing can be merged")
    return changed


def _added(tensor: torch.Tensor, delta: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.shape != delta.shape:
        raise SpecError(f"{where} has shape {tuple(tensor.shape)}, the adapter changes {tuple(delta.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise SpecError(f"{where} is {tensor.dtype}; an adapter can be merged into unquantised weights only")
    merged = (tensor.float() + delta).to(tensor.dtype)
    if not torch.isfinite(merged).all():
        raise IntegrityError(f"{where}: the merged values are not finite; the adapter holds NaN or infinite values")
    return merged


def _changes(adapter: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Change]:
    """Changes by layer key of the weight: `….q_proj`, or `….experts.gate_up_proj` for fused experts."""
    path = adapter / CONFIG_NAME
    try:
        fields = json.loads(path.read_bytes())
        rank, scaling = int(fields["r"]), float(fields["lora_alpha"]) / int(fields["r"])
        tensors = load_file(adapter / WEIGHTS_NAME)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise IntegrityError(f"{adapter}: not a readable PEFT adapter: {error}") from error
    for key in _NOT_PLAIN_LORA:
        if fields.get(key):
            raise SpecError(f"{path}: {key} is set; only plain LoRA is merged")
    if fields.get("bias", "none") != "none":
        raise SpecError(f"{path}: bias is {fields['bias']!r}; only plain LoRA is merged")
    changes: dict[str, _Change] = {}
    modules = sorted(name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight"))
    pairs = {f"{module}.{part}.weight" for module in modules for part in ("lora_A", "lora_B")}
    if others := sorted(tensors.keys() ^ pairs):
        raise SpecError(f"{adapter}: tensor {others[0]} has no lora_A or lora_B to go with; only plain LoRA is merged")
    for module in modules:
        key, first, second = layer_key(module), tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        if key is None:
            raise SpecError(f"{adapter}: {module} is no linear module of the decoder layers")
        while key.endswith(".base_layer"):  # PEFT nests the adapters of several parameters of one module
            key = key.removesuffix(".base_layer")
        if not key.endswith(".experts"):
            if (first.shape[:1], second.shape[1:]) != ((rank,), (rank,)):
                raise SpecError(
                    f"{adapter}: {module} has lora_B {tuple(second.shape)} and lora_A {tuple(first.shape)}; r is {rank}"
                )
            changes[key] = _Change(first, second, scaling)
            continue
        experts = first.shape[0] // rank
        change = _Change(
            first.reshape(experts, rank, first.shape[1]),
            second.reshape(second.shape[0], rank, experts).permute(2, 0, 1),
            scaling,
        )
        parameter = _expert_parameter(key, (second.shape[0], first.shape[1]), shapes)
        changes[f"{key}.{parameter}"] = change
    return changes


def _expert_parameter(experts: str, shape: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Which fused parameter an expert adapter of `shape` (out, in) is for: gate_up_proj [2I, H] or down_proj [H, I]."""
    fused = shapes.get(f"{experts}.gate_up_proj")
    single = shapes.get(f"{experts}.0.gate_proj.weight")
    rows, hidden = fused[1:] if fused is not None else (2 * single[0], single[1]) if single is not None else (0, 0)
    found = {(rows, hidden): "gate_up_proj", (hidden, rows // 2): "down_proj"}
    if shape not in found or not rows:
        raise SpecError(f"adapter of {experts} maps {shape[1]} to {shape[0]}; the snapshot has no such experts")
    return found[shape]


def _delta_of(name: str, changes: dict[str, _Change]) -> tuple[torch.Tensor | None, str | None]:
    """What is added to the snapshot's tensor `name`, and the key of the change it is part of."""
    key = layer_key(name)
    if key is None:
        return None, None
    module = key.removesuffix(".weight")
    if module in changes:
        return changes[module].delta(), module
    match = _EXPERT.fullmatch(key)
    if match is None:
        return None, None
    fused = f"{match['experts']}.{'down_proj' if match['name'] == 'down_proj' else 'gate_up_proj'}"
    if fused not in changes:
        return None, None
    change, number = changes[fused], int(match["number"])
    delta = change.lora_B[number].float() @ change.lora_A[number].float() * change.scaling
    if match["name"] == "down_proj":
        return delta, fused
    gate, up = delta.chunk(2, dim=0)
    return (gate if match["name"] == "gate_proj" else up), fused

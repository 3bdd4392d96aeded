"""Writes a PEFT adapter in the names SGLang 0.5.23 knows; the adapted model stays the same function.

* The gated delta net's `in_proj_qkv` becomes `in_proj_q`, `in_proj_k` and `in_proj_v`: each with the whole lora_A and
  its own rows of lora_B, because (B A) restricted to rows is (rows of B) A.
* A projection that the server computes together with others that have no adapter gets companions whose lora_B is zero.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longstraw_core.rollout.adapter_rules import (
    CONFIG_NAME,
    FUSED_PROJECTIONS,
    WEIGHTS_NAME,
    read_adapter_config,
)
from longstraw_core.rollout.snapshot_tensors import layer_key, layer_shapes
from longstraw_core.spec import IntegrityError, SpecError

DELTA_NET_FUSED = "in_proj_qkvz"
_DELTA_NET_PARTS = ("in_proj_q", "in_proj_k", "in_proj_v")


def write_served_adapter(adapter: Path, snapshot: Path, destination: Path) -> None:
    """Write the adapter that the server loads into `destination`, which must not exist.

    Args:
        adapter: PEFT directory; `adapter_config.json` and `adapter_model.safetensors`.
        snapshot: The base model, for the sizes of projections that have no adapter.

    Raises:
        SpecError: the adapter has a feature that cannot be served (see `longstraw_core.rollout.adapter_rules`), or a
            tensor that belongs to no module of the base model, or of another size or rank; nothing is written.
        IntegrityError: the weights are not a safetensors file, or not finite numbers.
    """
    fields = read_adapter_config(adapter)
    path = adapter / WEIGHTS_NAME
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}: not a readable safetensors file: {error}") from error
    shapes = layer_shapes(snapshot)
    modules = _modules(tensors, shapes, path)
    _check_modules(modules, shapes, rank=int(fields["r"]), path=path)
    served = _complete(_split_delta_net(modules, snapshot), shapes, rank=int(fields["r"]))
    names = {module.rsplit(".", 1)[-1] for module in served}
    if names & set(FUSED_PROJECTIONS[2]):
        names = names - set(FUSED_PROJECTIONS[2]) | {DELTA_NET_FUSED}
    config = fields | {"target_modules": sorted(names), "base_model_name_or_path": None}
    destination.mkdir(parents=True)
    flat = {f"{module}.{part}.weight": tensor for module, parts in served.items() for part, tensor in parts.items()}
    save_file(flat, destination / WEIGHTS_NAME, metadata={"format": "pt"})
    (destination / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


Modules = dict[str, dict[str, torch.Tensor]]
"""Full module name -> {"lora_A": [r, in], "lora_B": [out, r]}."""


def _modules(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], path: Path) -> Modules:
    modules: Modules = {}
    for name, tensor in sorted(tensors.items()):
        module, _, part = name.removesuffix(".weight").rpartition(".")
        key = layer_key(module)
        if part not in ("lora_A", "lora_B") or key is None or f"{key}.weight" not in shapes:
            raise SpecError(f"{path}: tensor {name} belongs to no linear module of the base model's decoder layers")
        modules.setdefault(module, {})[part] = tensor
    return modules


def _check_modules(modules: Modules, shapes: Mapping[str, tuple[int, ...]], *, rank: int, path: Path) -> None:
    """The server scales by lora_alpha / r of the configuration: a module of another rank would get another scale."""
    if not modules:
        raise SpecError(f"{path}: holds no tensors; there is nothing to serve")
    for module, parts in modules.items():
        shape = shapes[f"{layer_key(module)}.weight"]
        if set(parts) != {"lora_A", "lora_B"}:
            raise SpecError(f"{path}: module {module} lacks one of lora_A and lora_B")
        first, second = tuple(parts["lora_A"].shape), tuple(parts["lora_B"].shape)
        if (first, second) != ((rank, *shape[1:]), (shape[0], rank)):
            raise SpecError(
                f"{path}: module {module} has lora_B {second} and lora_A {first}; the base model's weight is {shape} "
                f"and r is {rank}"
            )
        for part, tensor in parts.items():
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                raise IntegrityError(f"{path}: tensor {module}.{part} holds values that are no finite numbers")


def _split_delta_net(modules: Modules, snapshot: Path) -> Modules:
    """Replace every `in_proj_qkv` by its three parts, rows in the order q, k, v."""
    split: Modules = {}
    sizes: tuple[int, int, int] | None = None
    for module, parts in modules.items():
        parent, _, name = module.rpartition(".")
        if name != "in_proj_qkv":
            split[module] = parts
            continue
        sizes = sizes or _delta_net_rows(snapshot)
        for part, rows in zip(_DELTA_NET_PARTS, parts["lora_B"].split(sizes), strict=True):
            split[f"{parent}.{part}"] = {"lora_A": parts["lora_A"].clone(), "lora_B": rows.contiguous()}
    return split


def _delta_net_rows(snapshot: Path) -> tuple[int, int, int]:
    config = json.loads((snapshot / "config.json").read_bytes())
    text = config.get("text_config", config)
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    return keys, keys, text["linear_num_value_heads"] * text["linear_value_head_dim"]


def _complete(modules: Modules, shapes: Mapping[str, tuple[int, ...]], *, rank: int) -> Modules:
    """Give every fused group of which some members are adapted the others too, with a zero lora_B."""
    complete = dict(modules)
    for module, parts in modules.items():
        parent, _, name = module.rpartition(".")
        group = next((group for group in FUSED_PROJECTIONS if name in group), (name,))
        for companion in group:
            full = f"{parent}.{companion}"
            if full in complete:
                continue
            rows, columns = _companion_shape(full, shapes)
            complete[full] = {
                "lora_A": parts["lora_A"].new_zeros(rank, columns),
                "lora_B": parts["lora_B"].new_zeros(rows, rank),
            }
    return dict(sorted(complete.items()))


def _companion_shape(module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Rows and columns of a projection without an adapter."""
    key = layer_key(module)
    shape = shapes.get(f"{key}.weight")
    if shape is not None:
        return shape[0], shape[1]
    parent, _, name = str(key).rpartition(".")
    fused = shapes.get(f"{parent}.in_proj_qkv.weight")
    gate = shapes.get(f"{parent}.in_proj_z.weight")
    if fused is None or gate is None or name not in _DELTA_NET_PARTS:
        raise SpecError(f"{module}: the base model has no such projection, which SGLang computes with its neighbours")
    values = gate[0]
    return (values if name == "in_proj_v" else (fused[0] - values) // 2), fused[1]

"""Weights and active LoRA factors of modules that PEFT may have wrapped, for mixers that apply weights themselves."""

from typing import Any, NamedTuple

import torch


class LowRank(NamedTuple):
    """An update `scale * B @ A` of a weight; for expert weights both factors have a leading expert dimension."""

    a: torch.Tensor
    """[rank, in] or [experts, rank, in]."""
    b: torch.Tensor
    """[out, rank] or [experts, out, rank]."""
    scale: float


def linear_weight(module: Any) -> tuple[torch.Tensor, list[LowRank]]:
    """Return the frozen weight [out, in] of a linear module and its active updates."""
    if not hasattr(module, "lora_A"):
        return module.weight, []
    weight = module.get_base_layer().weight
    return weight, [LowRank(*factors) for factors in _active_factors(module)]


def expert_weights(module: Any) -> tuple[Any, dict[str, list[LowRank]]]:
    """Return the experts module inside PEFT's parameter wrappers, and the active updates by parameter name.

    PEFT 0.21 stores lora_A as [experts * rank, in], expert-major, and lora_B as [out, rank * experts], expert-minor.
    """
    updates: dict[str, list[LowRank]] = {}
    while hasattr(module, "parameter_name"):
        experts = module.num_experts
        updates[module.parameter_name] = [
            LowRank(a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1), scale)
            for a, b, scale in _active_factors(module)
        ]
        module = module.base_layer
    return module, updates


def _active_factors(module: Any) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    if module.disable_adapters or module.merged:
        return []
    return [
        (module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
        for name in module.active_adapters
        if name in module.lora_A
    ]

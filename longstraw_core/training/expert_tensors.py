"""Tensors of expert adapters between ranks that hold a part and files that hold all of them."""

import torch
import torch.distributed as dist

from longstraw_core.mixers.exchange.expert_shard import is_expert_parameter, shard_of_lora
from longstraw_core.mixers.exchange.rank_group import RankGroup


def whole_tensors(tensors: dict[str, torch.Tensor], experts: int, group: RankGroup) -> dict[str, torch.Tensor]:
    """Return all experts' tensors on every rank of the group, on the CPU; the inverse of `held_tensors`.

    Args:
        tensors: by name; those of experts are this rank's part.
        experts: experts of the model.
        group: the ranks that share them.
    """
    whole = {}
    for name, tensor in tensors.items():
        mine = tensor.detach().contiguous()
        if group.size > 1 and is_expert_parameter(name):
            parts = [torch.empty_like(mine) for _ in range(group.size)]
            dist.all_gather(parts, mine, group=group.process_group)
            mine = _joined(name, parts, experts // group.size)
        whole[name] = mine.cpu()
    return whole


def _joined(name: str, parts: list[torch.Tensor], held: int) -> torch.Tensor:
    """PEFT's lora_A is expert-major in its rows, lora_B expert-minor in its columns."""
    if ".lora_A." in name:
        return torch.cat(parts, 0)
    by_expert = [part.reshape(part.shape[0], -1, held) for part in parts]
    return torch.cat(by_expert, -1).reshape(parts[0].shape[0], -1)


def held_tensors(tensors: dict[str, torch.Tensor], experts: int, group: RankGroup) -> dict[str, torch.Tensor]:
    """Return this rank's part of the experts' tensors, and all others as they are."""
    return {
        name: shard_of_lora(name, tensor, experts, group) if group.size > 1 and is_expert_parameter(name) else tensor
        for name, tensor in tensors.items()
    }

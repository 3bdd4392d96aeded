"""Which experts a rank of the expert-parallel group holds, and which parameters are therefore its own.

Formula: of E experts over M ranks, rank r holds [r E / M, (r + 1) E / M). A parameter of an expert has its complete
gradient on the rank that holds the expert, from the tokens of its whole expert-parallel group; every other parameter's
gradient is the sum of the local gradients over the context-parallel ranks.
"""

import itertools
from collections.abc import Iterable
from typing import Any

from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.errors import SpecError

_EXPERTS = "mlp.experts"


def held_experts(experts: int, group: RankGroup) -> range:
    """Return the experts that this rank holds.

    Raises:
        SpecError: the experts cannot be divided evenly.
    """
    if experts % group.size:
        raise SpecError(
            f"expert parallel size {group.size} does not divide the model's {experts} experts: choose a divisor"
        )
    held = experts // group.size
    return range(group.rank * held, (group.rank + 1) * held)


def is_expert_parameter(name: str) -> bool:
    """Whether a parameter name (of the model or of PEFT's state dict) belongs to a routed expert."""
    parts = name.split(".")
    return any(".".join(pair) == _EXPERTS for pair in itertools.pairwise(parts))


def expert_parameters(names: Iterable[str]) -> frozenset[str]:
    """Return those of `names` whose gradient must not be summed over the ranks of an expert-parallel group."""
    return frozenset(name for name in names if is_expert_parameter(name))


def shard_of_lora(name: str, factor: Any, experts: int, group: RankGroup) -> Any:
    """Return the part of an expert adapter's factor that belongs to this rank's experts.

    PEFT 0.21 stores lora_A as [experts * rank, in], expert-major, and lora_B as [out, rank * experts], expert-minor.
    """
    held = held_experts(experts, group)
    if ".lora_A." in name:
        per_expert = factor.reshape(experts, -1, factor.shape[-1])
        return per_expert[held.start : held.stop].reshape(-1, factor.shape[-1])
    per_expert = factor.reshape(factor.shape[0], -1, experts)
    return per_expert[..., held.start : held.stop].reshape(factor.shape[0], -1)

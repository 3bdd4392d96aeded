"""Which experts a rank holds, which parameters are theirs, and how PEFT's factors are cut."""

import pytest
import torch

from longstraw_core.mixers.exchange.expert_shard import expert_parameters, held_experts, shard_of_lora
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.errors import SpecError


class _Group(RankGroup):
    """A place among ranks that exchange nothing in these tests."""

    def __post_init__(self) -> None:
        pass


def test_the_experts_are_divided_in_order() -> None:
    held = [held_experts(8, _Group(rank, 4, None)) for rank in range(4)]
    assert [list(experts) for experts in held] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_uneven_number_of_experts_is_refused() -> None:
    with pytest.raises(SpecError, match="expert parallel size 3 does not divide the model's 8 experts"):
        held_experts(8, _Group(0, 3, None))


def test_only_routed_experts_own_their_gradient() -> None:
    names = [
        "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.default.weight",
        "base_model.model.model.layers.1.mlp.experts.lora_B.weight",
        "base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_b_proj.lora_A.weight",
    ]
    assert expert_parameters(names) == set(names[:2])


def test_a_shard_of_the_factors_updates_exactly_the_held_experts() -> None:
    experts, rank, wide, out = 6, 2, 5, 4
    a, b = torch.randn(experts * rank, wide), torch.randn(out, rank * experts)

    def updates(a_factor: torch.Tensor, b_factor: torch.Tensor, count: int) -> torch.Tensor:
        """PEFT's layout: A expert-major, B expert-minor."""
        a_ERI = a_factor.view(count, rank, wide)
        b_EOR = b_factor.view(out, rank, count).permute(2, 0, 1)
        return b_EOR @ a_ERI

    whole = updates(a, b, experts)
    for place in range(3):
        group = _Group(place, 3, None)
        part = updates(
            shard_of_lora("mlp.experts.lora_A.weight", a, experts, group),
            shard_of_lora("mlp.experts.lora_B.weight", b, experts, group).contiguous(),
            2,
        )
        assert torch.equal(part, whole[2 * place : 2 * place + 2])


def test_several_ranks_without_a_process_group_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="need a process group"):
        RankGroup(0, 2, None)

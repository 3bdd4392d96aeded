"""Matrices kept in shares: every element belongs to one rank, and a layer that is not used is not there."""

import gc
import sys
from typing import Any

import pytest
import torch

from longstraw_core.mixers.exchange.rank_group import ALONE
from longstraw_core.mixers.layer_weights import FlatLayout, share_loaded_layers, weights_on_use
from longstraw_core.mixers.nf4 import Nf4Share
from longstraw_core.spec.errors import SpecError
from tests.engine import glm_oracle, oracle
from tests.engine.parallel.cases import Case, engine_gradients


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_every_element_of_every_matrix_is_in_exactly_one_share(ranks: int) -> None:
    shapes = [(3, 5), (7, 64), (2, 3, 50), (1, 1)]
    layout = FlatLayout.of(shapes, ranks)
    flat = torch.full((ranks * layout.share,), -1)
    for rank in range(ranks):
        for part in layout.parts(rank):
            place = rank * layout.share + part.place
            assert bool((flat[place : place + part.count] == -1).all())
            flat[place : place + part.count] = 1000 * part.matrix + torch.arange(part.first, part.first + part.count)
    for matrix, (shape, start) in enumerate(zip(shapes, layout.starts, strict=True)):
        elements = torch.Size(shape).numel()
        assert flat[start : start + elements].tolist() == [1000 * matrix + element for element in range(elements)]
        assert start % 64 == 0
    assert layout.share % 64 == 0
    assert ranks * layout.share < sum(torch.Size(shape).numel() for shape in shapes) + 64 * (len(shapes) + ranks)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", [oracle, glm_oracle], ids=["hybrid", "glm"])
def test_weights_that_are_whole_on_use_give_the_same_bits(family: Any, recompute: bool) -> None:
    case = Case("alone", 60, (17, 1), 25, "exact", 1, checkpoint_layers=recompute)
    expected, expected_logprobs, _ = engine_gradients(family.tiny_policy_model(), case, ALONE)
    model = family.tiny_policy_model()
    share_loaded_layers(model.get_base_model(), ALONE, experts_divided=False)
    ours, logprobs, _ = engine_gradients(model, case, ALONE)
    assert all(torch.equal(a, b) for a, b in zip(logprobs, expected_logprobs, strict=True))
    assert all(torch.equal(ours[name], gradient) for name, gradient in expected.items())


def test_a_layer_that_is_not_used_is_not_there() -> None:
    model = oracle.tiny_base()
    layers: Any = model.model.layers
    whole = layers[1].mlp.up_proj.weight.detach().clone()
    share_loaded_layers(model, ALONE, experts_divided=False)
    weights = weights_on_use(model)
    assert weights is not None
    assert bool(layers[1].mlp.up_proj.weight.isnan().all())
    weights.use(1)
    assert torch.equal(layers[1].mlp.up_proj.weight, whole)
    weights.use(2)
    assert bool(layers[1].mlp.up_proj(torch.ones(1, 48)).isnan().all())
    assert not layers[1].input_layernorm.weight.isnan().any(), "vectors are small and stay"


def test_responses_leave_nothing_in_memory() -> None:
    model = oracle.tiny_policy_model()
    share_loaded_layers(model.get_base_model(), ALONE, experts_divided=False)

    def tensors_after(responses: int) -> int:
        gc.collect()
        gc.disable()
        try:
            engine_gradients(model, Case("alone", 40, (5,) * responses, 25, "exact", 1), ALONE)
            model.zero_grad(set_to_none=True)
            return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
        finally:
            gc.enable()

    tensors_after(1)
    assert tensors_after(6) == tensors_after(1)


def test_nf4_without_bitsandbytes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    with pytest.raises(SpecError, match=r"^model.quantization: nf4 needs the package bitsandbytes"):
        Nf4Share(torch.zeros(64))

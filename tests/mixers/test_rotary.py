"""Rotary angles against transformers' module, and at positions that bf16 cannot tell apart."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from longstraw_core.mixers.rotary import inverse_frequencies, rotary_angles, rotary_frequencies, rotate
from longstraw_core.spec.errors import SpecError
from tests.engine.oracle import tiny_config


def test_angles_and_rotation_equal_transformers() -> None:
    config = tiny_config(["full_attention"])
    reference = Qwen3_5TextRotaryEmbedding(config)
    x_TND = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(0))
    for start in (0, 5, 65_533):
        positions = torch.arange(start, start + 6)[None, None].expand(3, 1, -1)
        cos, sin = reference(x_TND, positions)
        cos_TD, sin_TD = rotary_angles(start, 6, inverse_frequencies(10_000_000.0, 8, torch.device("cpu")))
        assert torch.equal(cos_TD, cos[0])
        assert torch.equal(sin_TD, sin[0])
        expected, _ = apply_rotary_pos_emb(x_TND[None], x_TND[None], cos, sin, unsqueeze_dim=2)
        torch.testing.assert_close(rotate(x_TND, cos_TD, sin_TD), expected[0], rtol=0, atol=1e-6)


def test_neighbouring_far_positions_rotate_differently_in_bfloat16() -> None:
    inverse = inverse_frequencies(10_000_000.0, 8, torch.device("cpu"))
    x_TND = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    rotated_TND = rotate(x_TND, *rotary_angles(65_535, 2, inverse))
    assert rotated_TND.dtype == torch.bfloat16
    assert (rotated_TND[0] - rotated_TND[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 0.0),
        ("rope_theta", "1e4"),
        ("factor", 0.5),  # transformers has another amplitude below 1
        ("factor", None),
        ("factor", float("nan")),
        ("original_max_position_embeddings", 0),
        ("original_max_position_embeddings", True),
    ],
)
def test_parameters_that_give_no_angles_are_refused_by_name(field: str, value: object) -> None:
    good = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    rotary_frequencies(good, 8, torch.device("cpu"))
    with pytest.raises(SpecError, match=f"rope parameter '{field}' is"):
        rotary_frequencies(good | {field: value}, 8, torch.device("cpu"))

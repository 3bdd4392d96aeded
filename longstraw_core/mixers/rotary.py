"""Partial rotary position embedding with angles from fp32 positions (65,535 and 65,536 differ in bf16).

Formulas: transformers 5.24 modeling_qwen3_5.py, `Qwen3_5TextRotaryEmbedding` and `apply_rotary_pos_emb`. For text
the three position grids of the interleaved multimodal rotary embedding are equal, which makes it the ordinary one.
YaRN: arXiv 2309.00071, section 3; transformers 5.24 modeling_rope_utils.py, `_compute_yarn_parameters`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from longstraw_core.spec.errors import SpecError

_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
_COMMON_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def inverse_frequencies(theta: float, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """Return theta^(-2i / rotary_dim), fp32, [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / (theta**exponents)).to(device)


def rotary_frequencies(
    parameters: Mapping[str, Any], rotary_dim: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Return (inverse frequencies [rotary_dim / 2] in fp32, factor of cosines and sines) of a rope configuration.

    Raises:
        SpecError: the rope type, or a parameter of it, is not supported.
    """
    kind = parameters.get("rope_type", "default")
    _require_at_least(parameters, "rope_theta", 1.0)
    inverse = inverse_frequencies(parameters["rope_theta"], rotary_dim, device)
    if kind == "default":
        return inverse, 1.0
    if kind != "yarn":
        raise SpecError(f"rope type {kind!r} is not supported; supported are 'default' and 'yarn'")
    unknown = {key for key, value in parameters.items() if value is not None} - _YARN_KEYS - _COMMON_KEYS
    if unknown:
        raise SpecError(f"rope parameter {min(unknown)!r} is not supported with rope type 'yarn'")
    _require_at_least(parameters, "factor", 1.0)
    _require_at_least(parameters, "original_max_position_embeddings", 1.0)
    factor = parameters["factor"]
    amplitude = parameters.get("attention_factor")
    if amplitude is None:
        amplitude = 0.1 * math.log(factor) + 1.0
    own_F = _share_of_own_frequency(
        rotary_dim,
        theta=parameters["rope_theta"],
        positions=parameters["original_max_position_embeddings"],
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
    ).to(device)
    return inverse * own_F + inverse / factor * (1.0 - own_F), float(amplitude)


def _require_at_least(parameters: Mapping[str, Any], name: str, least: float) -> None:
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise SpecError(f"rope parameter {name!r} is {value!r:.40}: it must be a number of at least {least:g}")


def _share_of_own_frequency(
    rotary_dim: int, *, theta: float, positions: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """Share of each frequency that YaRN keeps, [rotary_dim / 2]: 1 for fast dimensions, 0 for slow ones."""

    def dimension_that_turns(times: float) -> float:
        return rotary_dim * math.log(positions / (times * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first = max(math.floor(dimension_that_turns(beta_fast)), 0)
    last = min(math.ceil(dimension_that_turns(beta_slow)), rotary_dim - 1)
    width = last - first if last != first else 0.001
    dimensions_F = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1.0 - ((dimensions_F - first) / width).clamp(0.0, 1.0)


def rotary_angles(
    start: int, length: int, inverse: torch.Tensor, amplitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return amplitude * (cos, sin) of positions [start, start + length), fp32, each [length, rotary dim]."""
    positions_T = torch.arange(start, start + length, device=inverse.device, dtype=torch.int64).float()
    angles_TF = positions_T[:, None] * inverse[None, :]
    angles_TD = torch.cat((angles_TF, angles_TF), dim=-1)
    return angles_TD.cos() * amplitude, angles_TD.sin() * amplitude


def rotate(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate the first R of D channels of every head (half-split pairs) in fp32; return `x_TND`'s dtype."""
    rotary_dim = cos_TR.shape[-1]
    rotated_TNR, rest = x_TND[..., :rotary_dim].float(), x_TND[..., rotary_dim:]
    first, second = rotated_TNR.chunk(2, dim=-1)
    swapped_TNR = torch.cat((-second, first), dim=-1)
    rotated_TNR = rotated_TNR * cos_TR[:, None, :] + swapped_TNR * sin_TR[:, None, :]
    return torch.cat((rotated_TNR.to(x_TND.dtype), rest), dim=-1)


def rotate_interleaved(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate all channels of every head in pairs (0, 1), (2, 3), … in fp32; return `x_TND`'s dtype.

    The result holds first all even, then all odd channels: queries and keys agree on it, as in transformers 5.24
    modeling_glm_moe_dsa.py, `apply_rotary_pos_emb_interleave`.
    """
    half = cos_TR.shape[-1] // 2
    cos_T1F, sin_T1F = cos_TR[:, None, :half], sin_TR[:, None, :half]
    even, odd = x_TND[..., 0::2].float(), x_TND[..., 1::2].float()
    rotated = torch.cat((even * cos_T1F - odd * sin_T1F, odd * cos_T1F + even * sin_T1F), dim=-1)
    return rotated.to(x_TND.dtype)

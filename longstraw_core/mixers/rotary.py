"""Partial rotary position embedding with angles from fp32 positions (65,535 and 65,536 differ in bf16).

Formulas: transformers 5.24 modeling_qwen3_5.py, `Qwen3_5TextRotaryEmbedding` and `apply_rotary_pos_emb`. For text
the three position grids of the interleaved multimodal rotary embedding are equal, which makes it the ordinary one.
"""

import torch


def inverse_frequencies(theta: float, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """Return theta^(-2i / rotary_dim), fp32, [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / (theta**exponents)).to(device)


def rotary_angles(start: int, length: int, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) of positions [start, start + length), fp32, each [length, rotary dim]."""
    positions_T = torch.arange(start, start + length, device=inverse.device, dtype=torch.int64).float()
    angles_TF = positions_T[:, None] * inverse[None, :]
    angles_TD = torch.cat((angles_TF, angles_TF), dim=-1)
    return angles_TD.cos(), angles_TD.sin()


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

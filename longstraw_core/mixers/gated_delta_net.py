"""Qwen3.5's gated delta net over a resident recurrent state, on the projections of the Hugging Face module.

Formulas: transformers 5.24 modeling_qwen3_5.py, `Qwen3_5GatedDeltaNet`. The causal depthwise convolution reads the
last kernel - 1 columns before the segment from the resident tail, so segments of any length >= 1 join exactly.
"""

from typing import Any

import torch
import torch.nn.functional as F

from longstraw_core.mixers.delta_rule import chunked_delta_rule
from longstraw_core.mixers.family import Mixed, StateBytes
from longstraw_core.mixers.segment import Segment
from longstraw_core.mixers.state_read import read_resident
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.resident.recurrent_state import RecurrentLayout, RecurrentState

NORMALISATION_EPSILON = 1e-6


def _l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORMALISATION_EPSILON)


class GatedDeltaNet:
    """Token mixer of one `linear_attention` layer; its modules may be wrapped by PEFT."""

    def __init__(self, module: Any, *, dtype: torch.dtype) -> None:
        self._module = module
        self._layout = RecurrentLayout(
            value_heads=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            channels=module.conv_dim,
            kernel=module.conv_kernel_size,
            dtype=dtype,
        )

    def new_state(self, pool: ResidentPool, owner: str) -> RecurrentState:
        """Return an empty recurrent state for this layer."""
        return RecurrentState(pool, owner, self._layout)

    def state_bytes(self, tokens: int, boundaries: int) -> StateBytes:
        """Bytes of the state, of its boundary copies and of its gradient sinks; independent of `tokens` above 0."""
        if tokens == 0:
            return StateBytes(0, 0, 0, self._layout.sink_bytes)
        return StateBytes(0, self._layout.bytes, boundaries * self._layout.bytes, self._layout.sink_bytes)

    def mix(self, x_TH: torch.Tensor, segment: Segment, state: RecurrentState, *, state_only: bool) -> Mixed:
        """Mix normalised hidden states [T, H]; produces (recurrent state [V, K, D] fp32, convolution tail [C, W])."""
        module, tokens = self._module, segment.length
        prefix = state.prefix(segment.start, with_gradient=segment.state_gradient)
        tail_CW = read_resident(prefix.tail_CW, prefix.tail_sink_CW)
        extended_CX = torch.cat((tail_CW, module.in_proj_qkv(x_TH).transpose(0, 1)), dim=1)
        new_tail_CW = extended_CX[:, extended_CX.shape[1] - tail_CW.shape[1] :]
        conv = module.conv1d
        mixed_TC = F.conv1d(extended_CX[None], conv.weight, groups=conv.groups)[0].transpose(0, 1)
        mixed_TC = F.silu(mixed_TC)

        key_heads, repeats = module.num_k_heads, module.num_v_heads // module.num_k_heads
        q_TC, k_TC, v_TC = mixed_TC.split((module.key_dim, module.key_dim, module.value_dim), dim=-1)
        q_TGK = _l2_normalised(q_TC.reshape(tokens, key_heads, module.head_k_dim)) * module.head_k_dim**-0.5
        k_TGK = _l2_normalised(k_TC.reshape(tokens, key_heads, module.head_k_dim))
        v_TVD = v_TC.reshape(tokens, module.num_v_heads, module.head_v_dim)
        beta_TV = module.in_proj_b(x_TH).sigmoid()
        log_decay_TV = -module.A_log.float().exp() * F.softplus(module.in_proj_a(x_TH).float() + module.dt_bias)
        out_TVD, new_state_VKD = chunked_delta_rule(
            q_TGK.repeat_interleave(repeats, dim=1),  # consecutive value heads share a key head
            k_TGK.repeat_interleave(repeats, dim=1),
            v_TVD,
            log_decay_TV,
            beta_TV,
            read_resident(prefix.state_VKD, prefix.state_sink_VKD),
        )
        if state_only:
            return Mixed(None, (new_state_VKD, new_tail_CW))
        z_TVD = module.in_proj_z(x_TH).view(tokens, module.num_v_heads, module.head_v_dim)
        normed_TVD = module.norm(out_TVD.to(x_TH.dtype), z_TVD)
        y_TH = module.out_proj(normed_TVD.reshape(tokens, module.value_dim))
        return Mixed(y_TH, (new_state_VKD, new_tail_CW))

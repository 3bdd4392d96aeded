"""Qwen3.5's gated delta net over a resident recurrent state, on the projections of the Hugging Face module.

Formulas: transformers 5.24 modeling_qwen3_5.py, `Qwen3_5GatedDeltaNet`. The causal depthwise convolution reads the
last kernel - 1 columns before the segment from the resident tail, so segments of any length >= 1 join exactly.

A rank projects the tokens that it owns and runs convolution and recurrence of the heads that it holds over all tokens
of the segment; state, tail and boundary copies are those of its heads and never travel.
"""

from typing import Any

import torch
import torch.nn.functional as F

from longstraw_core.mixers.delta_rule import chunked_delta_rule
from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.head_shard import HeadExchange, HeadSizes
from longstraw_core.mixers.family import Mixed, StateBytes
from longstraw_core.mixers.segment import Segment
from longstraw_core.mixers.state_read import read_resident
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.resident.recurrent_state import RecurrentLayout, RecurrentState

NORMALISATION_EPSILON = 1e-6


def _l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORMALISATION_EPSILON)


class GatedDeltaNet:
    """Token mixer of one `linear_attention` layer; its modules may be wrapped by PEFT."""

    def __init__(self, module: Any, *, dtype: torch.dtype, exchange: Exchange) -> None:
        self._module = module
        self._heads = HeadExchange(
            exchange, HeadSizes(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        )
        self._channels = self._heads.channels(module.conv1d.weight.device)
        self._layout = RecurrentLayout(
            value_heads=self._heads.sizes.value_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            channels=self._heads.sizes.channels,
            kernel=module.conv_kernel_size,
            dtype=dtype,
            held_heads=None if self._channels is None else tuple(self._heads.held.value),
            held_channels=None if self._channels is None else tuple(self._channels.tolist()),
        )

    @property
    def heads(self) -> HeadExchange:
        """The heads that this rank holds, and the way to them."""
        return self._heads

    def new_state(self, pool: ResidentPool, owner: str) -> RecurrentState:
        """Return an empty recurrent state for this layer."""
        return RecurrentState(pool, owner, self._layout)

    def state_bytes(self, ownership: PromptOwnership, boundaries: int) -> StateBytes:
        """Bytes of the state, of its boundary copies and of its gradient sinks; the same for every prompt above 0."""
        if ownership.tokens == 0:
            return StateBytes(0, 0, 0, self._layout.sink_bytes)
        return StateBytes(0, self._layout.bytes, boundaries * self._layout.bytes, self._layout.sink_bytes)

    def mix(self, x_TH: torch.Tensor, segment: Segment, state: RecurrentState, *, state_only: bool) -> Mixed:
        """Mix normalised hidden states [T, H]; produces (recurrent state [V, K, D] fp32, convolution tail [C, W])."""
        module, sizes, ownership = self._module, self._heads.sizes, segment.ownership
        tokens = ownership.tokens
        prefix = state.prefix(segment.start, with_gradient=segment.state_gradient)
        tail_CW = read_resident(prefix.tail_CW, prefix.tail_sink_CW)
        qkv_TC, beta_TV, decay_TV = self._heads.to_heads(
            module.in_proj_qkv(x_TH), module.in_proj_b(x_TH), module.in_proj_a(x_TH), ownership
        )
        extended_CX = torch.cat((tail_CW, qkv_TC.transpose(0, 1)), dim=1)
        new_tail_CW = extended_CX[:, extended_CX.shape[1] - tail_CW.shape[1] :]
        conv_C1W = self._of_held_channels(module.conv1d.weight)
        mixed_TC = F.silu(F.conv1d(extended_CX[None], conv_C1W, groups=sizes.channels)[0].transpose(0, 1))

        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        q_TC, k_TC, v_TC = mixed_TC.split((keys, keys, values), dim=-1)
        q_TGK = _l2_normalised(q_TC.reshape(tokens, sizes.key_heads, sizes.key_dim)) * sizes.key_dim**-0.5
        k_TGK = _l2_normalised(k_TC.reshape(tokens, sizes.key_heads, sizes.key_dim))
        v_TVD = v_TC.reshape(tokens, sizes.value_heads, sizes.value_dim)
        held = slice(self._heads.held.value.start, self._heads.held.value.stop)
        log_decay_TV = -module.A_log.float()[held].exp() * F.softplus(decay_TV.float() + module.dt_bias[held])
        repeats = sizes.value_heads // sizes.key_heads
        out_TVD, new_state_VKD = chunked_delta_rule(
            q_TGK.repeat_interleave(repeats, dim=1),  # consecutive value heads share a key head
            k_TGK.repeat_interleave(repeats, dim=1),
            v_TVD,
            log_decay_TV,
            beta_TV.sigmoid(),
            read_resident(prefix.state_VKD, prefix.state_sink_VKD),
        )
        if state_only:
            return Mixed(None, (new_state_VKD, new_tail_CW))
        out_TX = self._heads.to_tokens(out_TVD.to(x_TH.dtype).reshape(tokens, values), ownership)
        out_TVD = out_TX.view(segment.length, module.num_v_heads, module.head_v_dim)
        normed_TVD = module.norm(out_TVD, module.in_proj_z(x_TH).view_as(out_TVD))
        y_TH = module.out_proj(normed_TVD.reshape(segment.length, module.value_dim))
        return Mixed(y_TH, (new_state_VKD, new_tail_CW))

    def _of_held_channels(self, weight_C1W: torch.Tensor) -> torch.Tensor:
        return weight_C1W if self._channels is None else weight_C1W[self._channels]

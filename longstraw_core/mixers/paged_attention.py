"""Causal attention of a segment over resident pages and itself, with exact gradients into page sinks.

The public attention operators cannot be used with plain autograd here: their backward ignores the gradient of the
log-sum-exp, which a merge of partials needs. So this is one autograd Function whose backward uses the merged output
and log-sum-exp. Gradients of pages are added in place to preallocated fp32 sinks. How queries and keys meet when ranks
own different tokens is the route's.
"""

from typing import Any

import torch

from longstraw_core.mixers.attention_routes import AttentionRoute, Local
from longstraw_core.resident.paged_keys_values import PagedPrefix


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        prefix: PagedPrefix,
        scale: float,
        route: AttentionRoute,
    ) -> torch.Tensor:
        out_TND, lse_TN = route.forward(q_TND, k_TKD, v_TKD, prefix, scale)
        out_TND = out_TND.to(q_TND.dtype)
        ctx.prefix, ctx.scale, ctx.route = prefix, scale, route
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, lse_TN)
        return out_TND

    @staticmethod
    def backward(ctx: Any, dout_TND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q_TND, k_TKD, v_TKD, out_TND, lse_TN = ctx.saved_tensors
        dq_TND, dk_TKD, dv_TKD = ctx.route.backward(
            dout_TND, q_TND, k_TKD, v_TKD, out_TND, lse_TN, ctx.prefix, ctx.scale
        )
        return dq_TND.to(q_TND.dtype), dk_TKD.to(k_TKD.dtype), dv_TKD.to(v_TKD.dtype), None, None, None


def paged_attention(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    prefix: PagedPrefix,
    *,
    scale: float,
    route: AttentionRoute | None = None,
) -> torch.Tensor:
    """Attend causally from a segment to the resident prefix and to the segment itself.

    Args:
        q_TND: queries [tokens, heads, head dim] of this rank's tokens, rotated.
        k_TKD: their keys [tokens, key heads, head dim], rotated; `v_TKD` their values.
        prefix: this rank's resident pages; every query sees those of all ranks. Their gradients go to the owners'
            sinks, when `prefix` has any.
        scale: factor of the scores.
        route: how queries and keys of different ranks meet; None when one rank has all.

    Returns:
        [tokens, heads, head dim] in the queries' dtype.
    """
    return _PagedAttention.apply(q_TND, k_TKD, v_TKD, prefix, scale, route or Local())  # type: ignore[return-value]

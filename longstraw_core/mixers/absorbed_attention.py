"""Absorbed latent attention over selected tokens as one autograd function, with exact gradients into the page sink."""

from typing import Any

import torch

from longstraw_core.mixers.latent_routes import Attended, LatentQueries, LatentRoute
from longstraw_core.mixers.selection import Selection
from longstraw_core.resident.latent_state import LatentState


class _AbsorbedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_TND: torch.Tensor,
        q_prefix_TND: torch.Tensor | None,
        own_TD: torch.Tensor,
        rest: tuple[Selection, LatentState, int, float, bool],
        route: LatentRoute,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended = route.forward(LatentQueries(q_TND, q_prefix_TND, own_TD, *rest))
        ctx.rest, ctx.route = rest, route
        merged = attended.lse_TN.numel() > 0 or attended.lse_TN.dim() > 1  # else backward recomputes what it needs
        ctx.save_for_backward(q_TND, q_prefix_TND, own_TD, *(attended if merged else (None, None, None)))
        return attended.out_TNL, attended.out_prefix_TNL

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout_TNL: torch.Tensor, dout_prefix_TNL: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q_TND, q_prefix_TND, own_TD, *attended = ctx.saved_tensors
        queries = LatentQueries(q_TND, q_prefix_TND, own_TD, *ctx.rest)
        found = ctx.route.backward(queries, Attended(*attended), dout_TNL, dout_prefix_TNL)
        return (
            found.dq_TND.to(q_TND.dtype),
            None if found.dq_prefix_TND is None else found.dq_prefix_TND.to(q_TND.dtype),
            found.down_SD.to(own_TD.dtype),
            None,
            None,
        )


def absorbed_attention(
    q_TND: torch.Tensor,
    q_prefix_TND: torch.Tensor | None,
    own_TD: torch.Tensor,
    selection: Selection,
    state: LatentState,
    *,
    latent: int,
    scale: float,
    state_gradient: bool,
    route: LatentRoute,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from a segment to the tokens it selected, resident ones and its own.

    Args:
        q_TND: absorbed queries [tokens, heads, latent + rope dim] of this rank's tokens, rotated.
        q_prefix_TND: queries for resident tokens where they differ from those for the segment's own, or None.
        own_TD: rows (latent, rope key) of this rank's tokens.
        selection: what the queries selected.
        state: this rank's resident rows; backward adds to its owners' sinks if `state_gradient`.
        latent: width of the latent, which is the value.
        scale: factor of the scores.
        route: how queries and rows of different ranks meet.

    Returns:
        Weighted latents [tokens, heads, latent] in fp32. With `q_prefix_TND` two of them, the part that comes from
        the segment's own tokens and the part that comes from resident ones; otherwise (all, None).
    """
    rest = (selection, state, latent, scale, state_gradient)
    return _AbsorbedAttention.apply(q_TND, q_prefix_TND, own_TD, rest, route)  # type: ignore[return-value]

"""Absorbed latent attention over selected tokens, in tiles of queries, with exact gradients into the page sink.

All heads share one key per token, the row (latent, rope key); its latent part is the value. Every row of a selection
holds all that a query attends to, so softmax needs no merging: forward keeps nothing but its inputs, and backward
gathers the rows again and recomputes the probabilities. Memory depends on the tile, not on the prefix.
All arithmetic is fp32, whatever the rows' dtype is.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from longstraw_core.resident.latent_state import LatentState

TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Gathered values held at once (1 MiB in fp32 on a CPU: within its cache); bounds the queries of a tile."""


class _Tile(NamedTuple):
    rows: slice
    positions: torch.Tensor
    """Absolute positions of what the tile's queries selected, flat [R * K]."""
    own_RK: torch.Tensor
    """Which of them lie in the segment itself."""
    keys_RKD: torch.Tensor
    p_RNK: torch.Tensor


class _Inputs(NamedTuple):
    q_TND: torch.Tensor
    q_prefix_TND: torch.Tensor | None
    """Queries for resident tokens when they differ from those for the segment's own."""
    own_TD: torch.Tensor
    selection_TK: torch.Tensor
    start: int
    scale: float


def _tiles(inputs: _Inputs, prefix_PD: torch.Tensor) -> Iterator[_Tile]:
    """Gather what the queries selected and compute their attention probabilities, tile by tile.

    The gathered rows of a tile are valid until the next one: all tiles share one buffer, because fresh memory for
    each would cost more than the gather.
    """
    start = inputs.start
    tokens, width = inputs.selection_TK.shape
    step = _tile_rows(inputs)
    gathered_XD = inputs.own_TD.new_empty((min(step, tokens) * width, inputs.own_TD.shape[1]))
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        positions_RK = inputs.selection_TK[rows].to(torch.int64)
        positions = positions_RK.reshape(-1)
        own_RK = positions_RK >= start
        keys_XD = gathered_XD[: positions.shape[0]]
        if start == 0:
            torch.index_select(inputs.own_TD, 0, positions, out=keys_XD)
        else:
            torch.index_select(prefix_PD, 0, positions.clamp(max=start - 1), out=keys_XD)
            where = own_RK.reshape(-1).nonzero()[:, 0]
            keys_XD.index_copy_(0, where, inputs.own_TD.index_select(0, positions[where] - start))
        keys_RKD = keys_XD.float().view(*positions_RK.shape, -1)
        s_RNK = _by_origin(own_RK, inputs.q_TND[rows], _rows(inputs.q_prefix_TND, rows), keys_RKD).mul_(inputs.scale)
        if start + rows.start < width:  # queries that see fewer tokens than a row holds: the rest is padding
            query_R = torch.arange(start + rows.start, start + rows.stop, device=positions.device)
            s_RNK.masked_fill_((positions_RK > query_R[:, None])[:, None], float("-inf"))
        yield _Tile(rows, positions, own_RK, keys_RKD, torch.softmax(s_RNK, dim=-1))


def _tile_rows(inputs: _Inputs) -> int:
    row_elements = inputs.selection_TK.shape[1] * inputs.own_TD.shape[1]
    return max(1, TILE_ELEMENTS.get(inputs.own_TD.device.type, TILE_ELEMENTS["cpu"]) // row_elements)


def _rows(x_TND: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if x_TND is None else x_TND[rows]


def _by_origin(
    own_RK: torch.Tensor, x_RND: torch.Tensor, x_prefix_RND: torch.Tensor | None, keys_RKD: torch.Tensor
) -> torch.Tensor:
    """Products with the keys [R, N, K]; those of resident tokens with `x_prefix_RND` when it is given."""
    products_RNK = torch.matmul(x_RND.float(), keys_RKD.transpose(1, 2))
    if x_prefix_RND is None:
        return products_RNK
    return torch.where(own_RK[:, None], products_RNK, torch.matmul(x_prefix_RND.float(), keys_RKD.transpose(1, 2)))


class _SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_TND: torch.Tensor,
        q_prefix_TND: torch.Tensor | None,
        own_TD: torch.Tensor,
        selection_TK: torch.Tensor,
        state: LatentState,
        start: int,
        latent: int,
        scale: float,
        state_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = _Inputs(q_TND, q_prefix_TND, own_TD, selection_TK, start, scale)
        out_TNL = q_TND.new_empty((*q_TND.shape[:2], latent), dtype=torch.float32)
        out_prefix_TNL = None if q_prefix_TND is None else torch.empty_like(out_TNL)
        for tile in _tiles(inputs, state.latents(start, backward=False)):
            v_RKL = tile.keys_RKD[..., :latent]
            if out_prefix_TNL is None:
                torch.matmul(tile.p_RNK, v_RKL, out=out_TNL[tile.rows])
            else:
                own_R1K = tile.own_RK[:, None]
                out_TNL[tile.rows] = torch.matmul(tile.p_RNK * own_R1K, v_RKL)
                out_prefix_TNL[tile.rows] = torch.matmul(tile.p_RNK * ~own_R1K, v_RKL)
        ctx.state, ctx.start, ctx.latent, ctx.scale, ctx.state_gradient = state, start, latent, scale, state_gradient
        ctx.save_for_backward(q_TND, q_prefix_TND, own_TD, selection_TK)
        return out_TNL, out_prefix_TNL

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout_TNL: torch.Tensor, dout_prefix_TNL: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q_TND, q_prefix_TND, own_TD, selection_TK = ctx.saved_tensors
        start, latent = ctx.start, ctx.latent
        inputs = _Inputs(q_TND, q_prefix_TND, own_TD, selection_TK, start, ctx.scale)
        dq_TND = torch.empty(q_TND.shape, dtype=torch.float32, device=q_TND.device)
        dq_prefix_TND = None if q_prefix_TND is None else torch.empty_like(dq_TND)
        down_TD = torch.zeros(own_TD.shape, dtype=torch.float32, device=own_TD.device)
        with_sink = ctx.state_gradient and start > 0
        scratch = torch.empty(
            min(_tile_rows(inputs), q_TND.shape[0]) * selection_TK.shape[1] * own_TD.shape[1],
            dtype=torch.float32,
            device=q_TND.device,
        )
        with ctx.state.gradient_sink(start) if with_sink else nullcontext() as sink_PD:
            for tile in _tiles(inputs, ctx.state.latents(start, backward=True)):
                dout_RNL = dout_TNL[tile.rows]
                dp_RNK = _by_origin(
                    tile.own_RK, dout_RNL, _rows(dout_prefix_TNL, tile.rows), tile.keys_RKD[..., :latent]
                )
                ds_RNK = dp_RNK.sub_((tile.p_RNK * dp_RNK).sum(-1, keepdim=True)).mul_(tile.p_RNK).mul_(ctx.scale)
                if dq_prefix_TND is None:
                    torch.matmul(ds_RNK, tile.keys_RKD, out=dq_TND[tile.rows])
                else:
                    own_R1K = tile.own_RK[:, None]
                    dq_TND[tile.rows] = torch.matmul(ds_RNK * own_R1K, tile.keys_RKD)
                    dq_prefix_TND[tile.rows] = torch.matmul(ds_RNK * ~own_R1K, tile.keys_RKD)
                _add_key_gradient(tile, ds_RNK, q_TND[tile.rows].float(), dout_RNL, start, down_TD, sink_PD, scratch)
        return (
            dq_TND.to(q_TND.dtype),
            None if dq_prefix_TND is None else dq_prefix_TND.to(q_TND.dtype),
            down_TD.to(own_TD.dtype),
            *(None,) * 6,
        )


def _add_key_gradient(
    tile: _Tile,
    ds_RNK: torch.Tensor,
    q_RND: torch.Tensor,
    dout_RNL: torch.Tensor,
    start: int,
    down_TD: torch.Tensor,
    sink_PD: torch.Tensor | None,
    scratch: torch.Tensor,
) -> None:
    """Add the gradient of the gathered rows to the segment's own rows and, when asked, to the resident sink."""
    rows, _, dim = q_RND.shape
    width = tile.own_RK.shape[1]
    if sink_PD is None:  # a selection ascends: own tokens stand in the last columns
        width = int(tile.own_RK.sum(1).max())
        if width == 0:
            return
    tail = slice(tile.own_RK.shape[1] - width, None)
    # one product for what rows receive as keys and, in their latent part, as values
    weights_RMK = torch.cat((ds_RNK[..., tail], tile.p_RNK[..., tail]), dim=1)
    received_RMD = torch.cat((q_RND, F.pad(dout_RNL, (0, dim - dout_RNL.shape[-1]))), dim=1)
    dkeys = scratch[: rows * width * dim].view(rows * width, dim)
    torch.bmm(weights_RMK.transpose(1, 2), received_RMD, out=dkeys.view(rows, width, dim))
    positions = tile.positions.view(-1, tile.own_RK.shape[1])[:, tail].reshape(-1)
    if start == 0:
        down_TD.index_add_(0, positions, dkeys)
        return
    own = tile.own_RK[:, tail].reshape(-1)
    where = own.nonzero()[:, 0]
    down_TD.index_add_(0, positions[where] - start, dkeys[where])
    if sink_PD is not None:
        where = (~own).nonzero()[:, 0]
        sink_PD.index_add_(0, positions[where], dkeys[where])


def selected_attention(
    q_TND: torch.Tensor,
    q_prefix_TND: torch.Tensor | None,
    own_TD: torch.Tensor,
    selection_TK: torch.Tensor,
    state: LatentState,
    *,
    start: int,
    latent: int,
    scale: float,
    state_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from a segment to the tokens it selected, resident ones and its own.

    Args:
        q_TND: absorbed queries [tokens, heads, latent + rope dim], rotated.
        q_prefix_TND: queries for resident tokens where they differ from those for the segment's own, or None.
        own_TD: rows (latent, rope key) of the segment's tokens.
        selection_TK: absolute positions, ascending, padding behind the query's own position.
        state: resident rows of the `start` tokens before the segment; backward adds to its sink if `state_gradient`.
        latent: width of the latent, which is the value.
        scale: factor of the scores.

    Returns:
        Weighted latents [tokens, heads, latent] in fp32. With `q_prefix_TND` two of them, the part that comes from
        the segment's own tokens and the part that comes from resident ones; otherwise (all, None).
    """
    return _SelectedAttention.apply(  # type: ignore[return-value]
        q_TND, q_prefix_TND, own_TD, selection_TK, state, start, latent, scale, state_gradient
    )

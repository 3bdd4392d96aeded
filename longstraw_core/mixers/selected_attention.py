"""Absorbed latent attention over selected tokens, in tiles of queries, and its gradient: the kernel seam.

All heads share one key per token, the row (latent, rope key); its latent part is the value. When a row of a selection
holds all that a query attends to, its softmax needs no merging. When other ranks hold the rest, the result is a partial
with its log-sum-exp, and the gradient takes the log-sum-exp and the row sums of the merged output
(`attention_routes.py` says why). Forward keeps nothing but its inputs, and backward gathers the rows again and
recomputes the probabilities. Memory depends on the tile, not on the prefix. All arithmetic is fp32, whatever the rows'
dtype is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Gathered values held at once (1 MiB in fp32 on a CPU: within its cache); bounds the queries of a tile."""


class SelectedRows(NamedTuple):
    """Queries and what they selected."""

    q_TND: torch.Tensor
    """Absorbed queries [queries, heads, latent + rope dim], rotated."""
    q_prefix_TND: torch.Tensor | None
    """Queries for resident tokens when they differ from those for the segment's own."""
    own_SD: torch.Tensor
    """Rows (latent, rope key) of tokens of the segment."""
    selection_TK: torch.Tensor
    """Row numbers, ascending in every row: resident rows from 0, then the rows of `own_SD`; -1 is no row.

    Without -1 they are positions, among which those behind the query's own are padding.
    """
    prefix_PD: torch.Tensor
    """Resident rows."""
    first_query: int
    """Position of the first query among the segment's tokens, when row numbers are positions."""
    partial: bool
    """Whether other ranks hold more of what the queries selected; row numbers are then not positions."""
    latent: int
    """Width of the latent, which is the value."""
    scale: float
    """Factor of the scores."""


class SelectedGradient(NamedTuple):
    """Gradients in fp32; those of resident rows were added to the sink."""

    dq_TND: torch.Tensor
    dq_prefix_TND: torch.Tensor | None
    down_SD: torch.Tensor


class _Tile(NamedTuple):
    rows: slice
    numbers: torch.Tensor
    """Row numbers of what the tile's queries selected, flat [R * K]."""
    own_RK: torch.Tensor
    """Which of them lie in the segment itself."""
    keys_RKD: torch.Tensor
    p_RNK: torch.Tensor
    lse_RN: torch.Tensor


def _tiles(inputs: SelectedRows, lse_TN: torch.Tensor | None) -> Iterator[_Tile]:
    """Gather what the queries selected and compute their attention probabilities, tile by tile.

    The gathered rows of a tile are valid until the next one: all tiles share one buffer, because fresh memory for
    each would cost more than the gather.
    """
    start = inputs.prefix_PD.shape[0]
    tokens, width = inputs.selection_TK.shape
    step = _tile_rows(inputs)
    gathered_XD = inputs.own_SD.new_empty((min(step, tokens) * width, inputs.own_SD.shape[1]))
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        numbers_RK = inputs.selection_TK[rows].to(torch.int64)
        numbers = numbers_RK.reshape(-1)
        own_RK = numbers_RK >= start
        keys_XD = gathered_XD[: numbers.shape[0]]
        if start == 0 and not inputs.partial:
            torch.index_select(inputs.own_SD, 0, numbers, out=keys_XD)
        else:
            if start == 0:
                keys_XD.zero_()
            else:
                torch.index_select(inputs.prefix_PD, 0, numbers.clamp(0, start - 1), out=keys_XD)
            where = own_RK.reshape(-1).nonzero()[:, 0]
            keys_XD.index_copy_(0, where, inputs.own_SD.index_select(0, numbers[where] - start))
        keys_RKD = keys_XD.float().view(*numbers_RK.shape, keys_XD.shape[1])
        s_RNK = _by_origin(own_RK, inputs.q_TND[rows], _rows(inputs.q_prefix_TND, rows), keys_RKD).mul_(inputs.scale)
        first = start + inputs.first_query + rows.start
        if inputs.partial:
            s_RNK.masked_fill_((numbers_RK < 0)[:, None], float("-inf"))
        elif first < width:  # queries that see fewer tokens than a row holds: the rest is padding
            query_R = torch.arange(first, first + numbers_RK.shape[0], device=numbers.device)
            s_RNK.masked_fill_((numbers_RK > query_R[:, None])[:, None], float("-inf"))
        if not inputs.partial:
            yield _Tile(rows, numbers, own_RK, keys_RKD, torch.softmax(s_RNK, dim=-1), s_RNK.new_empty(0))
            continue
        lse_RN = torch.logsumexp(s_RNK, dim=-1) if lse_TN is None else lse_TN[rows]
        # a query that selected nothing here has log-sum-exp -inf and probabilities 0
        p_RNK = s_RNK.sub_(lse_RN.masked_fill(lse_RN == float("-inf"), 0.0)[..., None]).exp_()
        yield _Tile(rows, numbers, own_RK, keys_RKD, p_RNK, lse_RN)


def _tile_rows(inputs: SelectedRows) -> int:
    row_elements = max(inputs.selection_TK.shape[1] * inputs.own_SD.shape[1], 1)
    return max(1, TILE_ELEMENTS.get(inputs.own_SD.device.type, TILE_ELEMENTS["cpu"]) // row_elements)


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


def attend_selected(inputs: SelectedRows) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Attend from queries to the rows they selected.

    Returns:
        Weighted latents [queries, heads, latent] in fp32: with `q_prefix_TND` the part that comes from the segment's
        own tokens and the part that comes from resident ones, otherwise (all, None). Then, of a partial, the
        log-sum-exp [queries, heads], -inf for a query that selected nothing here; else an empty tensor.
    """
    shape = (*inputs.q_TND.shape[:2], inputs.latent)
    out_TNL = torch.empty(shape, dtype=torch.float32, device=inputs.q_TND.device)
    out_prefix_TNL = None if inputs.q_prefix_TND is None else torch.empty_like(out_TNL)
    lse_TN = out_TNL.new_empty(shape[:2] if inputs.partial else (0,))
    for tile in _tiles(inputs, None):
        v_RKL = tile.keys_RKD[..., : inputs.latent]
        if inputs.partial:
            lse_TN[tile.rows] = tile.lse_RN
        if out_prefix_TNL is None:
            torch.matmul(tile.p_RNK, v_RKL, out=out_TNL[tile.rows])
        else:
            own_R1K = tile.own_RK[:, None]
            out_TNL[tile.rows] = torch.matmul(tile.p_RNK * own_R1K, v_RKL)
            out_prefix_TNL[tile.rows] = torch.matmul(tile.p_RNK * ~own_R1K, v_RKL)
    return out_TNL, out_prefix_TNL, lse_TN


def attend_selected_gradient(
    inputs: SelectedRows,
    dout_TNL: torch.Tensor,
    dout_prefix_TNL: torch.Tensor | None,
    sink_PD: torch.Tensor | None,
    *,
    lse_TN: torch.Tensor | None = None,
    delta_TN: torch.Tensor | None = None,
) -> SelectedGradient:
    """Back-propagate through `attend_selected`; add the gradient of resident rows to `sink_PD` when it is given.

    Args:
        dout_TNL: gradient of the output; of a partial, of the output that is merged over all ranks.
        dout_prefix_TNL: the same of the part from resident tokens.
        sink_PD: fp32 sink of the resident rows, or None when nobody asks.
        lse_TN: log-sum-exp over all ranks, of a partial only.
        delta_TN: row sums of dout * merged output, of a partial only.
    """
    q_TND, own_SD, start = inputs.q_TND, inputs.own_SD, inputs.prefix_PD.shape[0]
    dq_TND = torch.empty(q_TND.shape, dtype=torch.float32, device=q_TND.device)
    dq_prefix_TND = None if inputs.q_prefix_TND is None else torch.empty_like(dq_TND)
    down_SD = torch.zeros(own_SD.shape, dtype=torch.float32, device=own_SD.device)
    scratch = torch.empty(
        min(_tile_rows(inputs), q_TND.shape[0]) * inputs.selection_TK.shape[1] * own_SD.shape[1],
        dtype=torch.float32,
        device=q_TND.device,
    )
    for tile in _tiles(inputs, lse_TN):
        dout_RNL, dout_prefix_RNL = dout_TNL[tile.rows], _rows(dout_prefix_TNL, tile.rows)
        dp_RNK = _by_origin(tile.own_RK, dout_RNL, dout_prefix_RNL, tile.keys_RKD[..., : inputs.latent])
        delta_RN1 = (tile.p_RNK * dp_RNK).sum(-1, keepdim=True) if delta_TN is None else delta_TN[tile.rows, :, None]
        ds_RNK = dp_RNK.sub_(delta_RN1).mul_(tile.p_RNK).mul_(inputs.scale)
        if dq_prefix_TND is None:
            torch.matmul(ds_RNK, tile.keys_RKD, out=dq_TND[tile.rows])
        else:
            own_R1K = tile.own_RK[:, None]
            dq_TND[tile.rows] = torch.matmul(ds_RNK * own_R1K, tile.keys_RKD)
            dq_prefix_TND[tile.rows] = torch.matmul(ds_RNK * ~own_R1K, tile.keys_RKD)
        _add_key_gradient(tile, ds_RNK, q_TND[tile.rows].float(), dout_RNL.float(), start, down_SD, sink_PD, scratch)
    return SelectedGradient(dq_TND, dq_prefix_TND, down_SD)


def _add_key_gradient(
    tile: _Tile,
    ds_RNK: torch.Tensor,
    q_RND: torch.Tensor,
    dout_RNL: torch.Tensor,
    start: int,
    down_SD: torch.Tensor,
    sink_PD: torch.Tensor | None,
    scratch: torch.Tensor,
) -> None:
    """Add the gradient of the gathered rows to the segment's own rows and, when asked, to the resident sink."""
    rows, _, dim = q_RND.shape
    width = tile.own_RK.shape[1]
    if sink_PD is None:  # a selection ascends: own tokens stand in the last columns
        width = int(tile.own_RK.sum(1).max()) if width else 0
    if width == 0:
        return
    tail = slice(tile.own_RK.shape[1] - width, None)
    # one product for what rows receive as keys and, in their latent part, as values
    weights_RMK = torch.cat((ds_RNK[..., tail], tile.p_RNK[..., tail]), dim=1)
    received_RMD = torch.cat((q_RND, F.pad(dout_RNL, (0, dim - dout_RNL.shape[-1]))), dim=1)
    dkeys = scratch[: rows * width * dim].view(rows * width, dim)
    torch.bmm(weights_RMK.transpose(1, 2), received_RMD, out=dkeys.view(rows, width, dim))
    numbers = tile.numbers.view(-1, tile.own_RK.shape[1])[:, tail].reshape(-1)
    own = tile.own_RK[:, tail].reshape(-1)
    where = own.nonzero()[:, 0]
    if where.numel() == numbers.numel() and start == 0:
        down_SD.index_add_(0, numbers, dkeys)
        return
    down_SD.index_add_(0, numbers[where] - start, dkeys[where])
    if sink_PD is not None:
        where = (~own & (numbers >= 0)).nonzero()[:, 0]
        sink_PD.index_add_(0, numbers[where], dkeys[where])

"""Causal attention of some queries of a segment over page tiles and some keys of the segment, and its gradient.

Pure loops over tiles: scores exist for one tile at a time, so memory does not grow with the prompt. Queries and keys
of the segment may be different runs of it, because ranks own different runs: `first_query` and `first_key` say where
each run begins. All queries see all tiles.
"""

from collections.abc import Iterable, Iterator

import torch

from longstraw_core.mixers.attention_kernel import merge_partial, partial_attention, partial_attention_gradient
from longstraw_core.resident.paged_keys_values import PrefixTile

SCORE_TILE_ELEMENTS = 1 << 18
"""Scores held at once on a CPU: 1 MiB in fp32, which stays in its cache; bounds the query rows of a tile."""
GPU_SCORE_TILE_ELEMENTS = 1 << 23
"""The same on a GPU: 32 MiB, enough to fill it."""
SEGMENT_TILE_TOKENS = 256
"""Keys of the segment itself per tile."""


def _row_tiles(first: int, last: int, heads: int, keys: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of query rows [first, last) such that heads * rows * keys stays within the tile budget."""
    elements = SCORE_TILE_ELEMENTS if device.type == "cpu" else GPU_SCORE_TILE_ELEMENTS
    rows = max(1, elements // (heads * max(keys, 1)))
    for begin in range(first, last, rows):
        yield slice(begin, min(begin + rows, last))


def _segment_tiles(
    queries: int, keys: int, heads: int, offset: int, device: torch.device
) -> Iterator[tuple[slice, slice, int | None]]:
    """Yield (query rows, keys, diagonal) of what the queries see of the segment; query t sees keys <= t + offset."""
    for begin in range(0, keys, SEGMENT_TILE_TOKENS):
        tile = slice(begin, min(begin + SEGMENT_TILE_TOKENS, keys))
        for rows in _row_tiles(max(0, begin - offset), queries, heads, tile.stop - begin, device):
            diagonal = rows.start + offset - begin
            yield rows, tile, None if diagonal >= tile.stop - begin - 1 else diagonal


def grouped(x_TND: torch.Tensor, key_heads: int) -> torch.Tensor:
    """View [T, N, D] as [K, G, T, D]: consecutive query heads share a key head."""
    tokens, heads, dim = x_TND.shape
    return x_TND.view(tokens, key_heads, heads // key_heads, dim).permute(1, 2, 0, 3)


def ungrouped(x_KGTD: torch.Tensor) -> torch.Tensor:
    """Inverse of `grouped`, contiguous."""
    key_heads, group, tokens, dim = x_KGTD.shape
    return x_KGTD.permute(2, 0, 1, 3).reshape(tokens, key_heads * group, dim)


def attend(
    q_TND: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    tiles: Iterable[PrefixTile],
    *,
    first_query: int,
    first_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output [T, N, D], log-sum-exp [T, N]), fp32; a query that sees nothing has output 0 and -inf.

    Args:
        q_TND: queries from `first_query` of the segment on.
        k_SKD: keys from `first_key` of the segment on; `v_SKD` their values.
        tiles: resident keys and values.
        first_query: position of the first query in the segment.
        first_key: position of the first key in the segment.
        scale: factor of the scores.
    """
    queries, heads, _ = q_TND.shape
    q_KGTD = grouped(q_TND, k_SKD.shape[1])
    k_KSD, v_KSD = k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)
    out_KGTD = torch.zeros(q_KGTD.shape, dtype=torch.float32, device=q_TND.device)
    lse_KGT = torch.full(q_KGTD.shape[:3], float("-inf"), dtype=torch.float32, device=q_TND.device)

    def one_tile(rows: slice, k_KND: torch.Tensor, v_KND: torch.Tensor, diagonal: int | None) -> None:
        partial = partial_attention(q_KGTD[:, :, rows], k_KND, v_KND, scale=scale, diagonal=diagonal)
        merge_partial(out_KGTD[:, :, rows], lse_KGT[:, :, rows], *partial)

    for tile in tiles:
        for rows in _row_tiles(0, queries, heads, tile.k_KTD.shape[1], q_TND.device):
            one_tile(rows, tile.k_KTD, tile.v_KTD, None)
    offset = first_query - first_key
    for rows, keys, diagonal in _segment_tiles(queries, k_SKD.shape[0], heads, offset, q_TND.device):
        one_tile(rows, k_KSD[:, keys], v_KSD[:, keys], diagonal)
    return ungrouped(out_KGTD), ungrouped(lse_KGT[..., None])[..., 0]


def attend_gradient(
    dout_TND: torch.Tensor,
    q_TND: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    tiles: Iterable[PrefixTile],
    lse_TN: torch.Tensor,
    delta_TN: torch.Tensor,
    *,
    first_query: int,
    first_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what these keys contribute to dQ [T, N, D], and dK, dV [S, K, D] of the segment's keys, fp32.

    The gradients of resident keys and values are added to the tiles' sinks.

    Args:
        dout_TND: gradient of the output that is merged over *all* keys, wherever they are.
        lse_TN: log-sum-exp over all keys.
        delta_TN: row sums of dout * output over all keys.
    """
    queries, heads, _ = q_TND.shape
    key_heads = k_SKD.shape[1]
    q_KGTD, dout_KGTD = grouped(q_TND, key_heads), grouped(dout_TND.float(), key_heads)
    lse_KGT, delta_KGT = (grouped(x_TN[..., None], key_heads)[..., 0] for x_TN in (lse_TN, delta_TN))
    k_KSD, v_KSD = k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)
    dq_KGTD = torch.zeros(q_KGTD.shape, dtype=torch.float32, device=q_TND.device)
    dk_KSD, dv_KSD = (torch.zeros(k_KSD.shape, dtype=torch.float32, device=q_TND.device) for _ in range(2))

    def one_tile(
        rows: slice,
        k_KND: torch.Tensor,
        v_KND: torch.Tensor,
        diagonal: int | None,
        dk_KND: torch.Tensor | None,
        dv_KND: torch.Tensor | None,
    ) -> None:
        dq, dk, dv = partial_attention_gradient(
            dout_KGTD[:, :, rows],
            q_KGTD[:, :, rows],
            k_KND,
            v_KND,
            lse_KGT[:, :, rows],
            delta_KGT[:, :, rows],
            scale=scale,
            diagonal=diagonal,
            key_gradient=dk_KND is not None,
        )
        dq_KGTD[:, :, rows] += dq
        if dk_KND is not None and dv_KND is not None and dk is not None and dv is not None:
            dk_KND += dk
            dv_KND += dv

    for tile in tiles:
        for rows in _row_tiles(0, queries, heads, tile.k_KTD.shape[1], q_TND.device):
            one_tile(rows, tile.k_KTD, tile.v_KTD, None, tile.k_sink_KTD, tile.v_sink_KTD)
    offset = first_query - first_key
    for rows, keys, diagonal in _segment_tiles(queries, k_SKD.shape[0], heads, offset, q_TND.device):
        one_tile(rows, k_KSD[:, keys], v_KSD[:, keys], diagonal, dk_KSD[:, keys], dv_KSD[:, keys])
    return ungrouped(dq_KGTD), dk_KSD.transpose(0, 1), dv_KSD.transpose(0, 1)

"""Causal attention of a segment over resident pages and itself, in tiles, with exact gradients into page sinks.

The public attention operators cannot be used with plain autograd here: their backward ignores the gradient of the
log-sum-exp, which a merge of partials needs. So this is one autograd Function
whose backward uses the merged output and log-sum-exp. Scores exist for one tile at a time; memory does not grow with
the prompt. Gradients of pages are added in place to preallocated fp32 sinks.
"""

from collections.abc import Iterator
from typing import Any

import torch

from longstraw_core.mixers.attention_kernel import merge_partial, partial_attention, partial_attention_gradient
from longstraw_core.resident.paged_keys_values import PagedPrefix

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


def _grouped(x_TND: torch.Tensor, key_heads: int) -> torch.Tensor:
    """View [T, N, D] as [K, G, T, D]: consecutive query heads share a key head."""
    tokens, heads, dim = x_TND.shape
    return x_TND.view(tokens, key_heads, heads // key_heads, dim).permute(1, 2, 0, 3)


def _ungrouped(x_KGTD: torch.Tensor) -> torch.Tensor:
    """Inverse of `_grouped`, contiguous."""
    key_heads, group, tokens, dim = x_KGTD.shape
    return x_KGTD.permute(2, 0, 1, 3).reshape(tokens, key_heads * group, dim)


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        prefix: PagedPrefix,
        scale: float,
    ) -> torch.Tensor:
        tokens, heads, _ = q_TND.shape
        q_KGTD = _grouped(q_TND, k_TKD.shape[1])
        k_KTD, v_KTD = k_TKD.transpose(0, 1), v_TKD.transpose(0, 1)
        out_KGTD = torch.zeros(q_KGTD.shape, dtype=torch.float32, device=q_TND.device)
        lse_KGT = torch.full(q_KGTD.shape[:3], float("-inf"), dtype=torch.float32, device=q_TND.device)

        def attend(rows: slice, k_KND: torch.Tensor, v_KND: torch.Tensor, diagonal: int | None) -> None:
            partial = partial_attention(q_KGTD[:, :, rows], k_KND, v_KND, scale=scale, diagonal=diagonal)
            merge_partial(out_KGTD[:, :, rows], lse_KGT[:, :, rows], *partial)

        for tile in prefix.tiles():
            for rows in _row_tiles(0, tokens, heads, tile.k_KTD.shape[1], q_TND.device):
                attend(rows, tile.k_KTD, tile.v_KTD, None)
        for begin in range(0, tokens, SEGMENT_TILE_TOKENS):
            keys = slice(begin, min(begin + SEGMENT_TILE_TOKENS, tokens))
            for rows in _row_tiles(begin, tokens, heads, keys.stop - begin, q_TND.device):
                attend(rows, k_KTD[:, keys], v_KTD[:, keys], rows.start - begin)
        out_TND = _ungrouped(out_KGTD).to(q_TND.dtype)
        ctx.prefix, ctx.scale = prefix, scale
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, lse_KGT)
        return out_TND

    @staticmethod
    def backward(ctx: Any, dout_TND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q_TND, k_TKD, v_TKD, out_TND, lse_KGT = ctx.saved_tensors
        prefix, scale = ctx.prefix, ctx.scale
        tokens, heads, _ = q_TND.shape
        key_heads = k_TKD.shape[1]
        q_KGTD = _grouped(q_TND, key_heads)
        k_KTD, v_KTD = k_TKD.transpose(0, 1), v_TKD.transpose(0, 1)
        dout_KGTD = _grouped(dout_TND.float(), key_heads)
        delta_KGT = (dout_KGTD * _grouped(out_TND.float(), key_heads)).sum(-1)
        dq_KGTD = torch.zeros(q_KGTD.shape, dtype=torch.float32, device=q_TND.device)
        dk_KTD = torch.zeros(k_KTD.shape, dtype=torch.float32, device=q_TND.device)
        dv_KTD = torch.zeros(v_KTD.shape, dtype=torch.float32, device=q_TND.device)

        def attend(
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

        for tile in prefix.tiles():
            for rows in _row_tiles(0, tokens, heads, tile.k_KTD.shape[1], q_TND.device):
                attend(rows, tile.k_KTD, tile.v_KTD, None, tile.k_sink_KTD, tile.v_sink_KTD)
        for begin in range(0, tokens, SEGMENT_TILE_TOKENS):
            keys = slice(begin, min(begin + SEGMENT_TILE_TOKENS, tokens))
            for rows in _row_tiles(begin, tokens, heads, keys.stop - begin, q_TND.device):
                diagonal = rows.start - begin
                attend(rows, k_KTD[:, keys], v_KTD[:, keys], diagonal, dk_KTD[:, keys], dv_KTD[:, keys])
        return (
            _ungrouped(dq_KGTD).to(q_TND.dtype),
            dk_KTD.transpose(0, 1).to(k_TKD.dtype),
            dv_KTD.transpose(0, 1).to(v_TKD.dtype),
            None,
            None,
        )


def paged_attention(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, prefix: PagedPrefix, *, scale: float
) -> torch.Tensor:
    """Attend causally from a segment to the resident prefix and to the segment itself.

    Args:
        q_TND: queries [tokens, heads, head dim], rotated.
        k_TKD: the segment's keys [tokens, key heads, head dim], rotated; `v_TKD` its values.
        prefix: resident pages; every query sees all of them. Their gradients go to `prefix`'s sinks, when it has any.
        scale: factor of the scores.

    Returns:
        [tokens, heads, head dim] in the queries' dtype.
    """
    return _PagedAttention.apply(q_TND, k_TKD, v_TKD, prefix, scale)  # type: ignore[return-value]

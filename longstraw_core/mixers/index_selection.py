"""Which tokens a query attends to: index scores in tiles, and a top-k whose ties go to the lower position.

score[t, s] = sum over heads of w[t, h] * relu(q[t, h] · k[s] * scale), in fp32; transformers 5.24
modeling_glm_moe_dsa.py, `GlmMoeDsaIndexer`. Scores per head exist for one tile at a time, never as [S, heads, T].
A selection is a table of positions [T, K], ascending in every row. A query that sees at most K tokens selects all of
them; its row is 0 … K-1, in which positions behind the query's own are padding that attention must hide.
"""

import torch

from longstraw_core.spec.errors import NumericError

HEAD_SCORES = 1 << 18
"""Scores per head held at once (1 MiB in fp32, within a CPU's cache)."""
KEY_TILE = 512
ROW_SCORES = 1 << 22
"""Summed scores held at once; bounds the rows of a tile for long prefixes."""


def first_selecting_row(start: int, length: int, top_k: int) -> int:
    """Return the first row of a segment whose query sees more than `top_k` tokens."""
    return min(max(top_k - start, 0), length)


def selection_table(start: int, length: int, top_k: int, selected_SK: torch.Tensor) -> torch.Tensor:
    """Put rows that see at most `top_k` tokens before the rows `selected_SK` of the others; int32 [length, K]."""
    width = min(top_k, start + length)
    all_K = torch.arange(width, dtype=torch.int32, device=selected_SK.device)
    seeing_all = first_selecting_row(start, length, top_k)
    if seeing_all == length:
        return all_K.expand(length, width)
    return torch.cat((all_K.expand(seeing_all, width), selected_SK.to(torch.int32)))


def lowest_top_k(scores_RT: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the positions of the `top_k` highest scores of every row, ascending; ties go to the lower position.

    Raises:
        NumericError: a score is not a number.
    """
    rows = scores_RT.shape[0]
    cut_R1 = scores_RT.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    chosen_RT = scores_RT >= cut_R1
    positions = chosen_RT.nonzero()[:, 1]
    if positions.numel() != rows * top_k:  # more than fit stand exactly at the cut
        tied_RT = scores_RT == cut_R1
        room_R1 = top_k - (scores_RT > cut_R1).sum(-1, keepdim=True)
        chosen_RT &= ~tied_RT | (tied_RT.cumsum(-1) <= room_R1)
        positions = chosen_RT.nonzero()[:, 1]
    if positions.numel() != rows * top_k:
        raise NumericError("index scores are not numbers: the hidden states have overflowed")
    return positions.view(-1, top_k)


@torch.no_grad()
def select_tokens(
    q_TNI: torch.Tensor,
    w_TN: torch.Tensor,
    prefix_keys_PI: torch.Tensor,
    own_keys_TI: torch.Tensor,
    *,
    top_k: int,
    scale: float,
) -> torch.Tensor:
    """Select `top_k` tokens for every query that sees more than that.

    Args:
        q_TNI: index queries [tokens, index heads, index dim], rotated.
        w_TN: weight of every head, fp32.
        prefix_keys_PI: index keys of the resident tokens before the segment.
        own_keys_TI: index keys of the segment's tokens.
        top_k: tokens to select.
        scale: factor of the products before the rectifier.

    Returns:
        Absolute positions, int64 [S, top_k], for the segment's rows from `first_selecting_row` on.
    """
    length, heads, _ = q_TNI.shape
    start = prefix_keys_PI.shape[0]
    first = first_selecting_row(start, length, top_k)
    rows = max(1, min(HEAD_SCORES // (heads * KEY_TILE), ROW_SCORES // max(start + length, 1)))
    selected = [
        lowest_top_k(
            _causal_scores(
                q_TNI[begin : begin + rows].float(),
                w_TN[begin : begin + rows],
                prefix_keys_PI,
                own_keys_TI,
                begin,
                scale,
            ),
            top_k,
        )
        for begin in range(first, length, rows)
    ]
    if not selected:
        return torch.empty((0, top_k), dtype=torch.int64, device=q_TNI.device)
    return torch.cat(selected)


def _causal_scores(
    q_RNI: torch.Tensor,
    w_RN: torch.Tensor,
    prefix_keys_PI: torch.Tensor,
    own_keys_TI: torch.Tensor,
    first_row: int,
    scale: float,
) -> torch.Tensor:
    """Scores [rows, tokens up to the last row's own] of consecutive queries; -inf where a query must not look."""
    rows, heads, dim = q_RNI.shape
    start, own = prefix_keys_PI.shape[0], first_row + rows
    scores_RT = torch.empty((rows, start + own), dtype=torch.float32, device=q_RNI.device)
    q = q_RNI.reshape(rows * heads, dim)
    scratch = torch.empty(rows * heads * KEY_TILE, dtype=torch.float32, device=q.device)
    for keys_SI, offset in ((prefix_keys_PI, 0), (own_keys_TI[:own], start)):
        for begin in range(0, keys_SI.shape[0], KEY_TILE):
            tile_SI = keys_SI[begin : begin + KEY_TILE].float()
            s_XS = scratch[: rows * heads * tile_SI.shape[0]].view(rows * heads, -1)
            s_RNS = torch.mm(q, tile_SI.t(), out=s_XS).mul_(scale).relu_().view(rows, heads, -1)
            target = slice(offset + begin, offset + begin + tile_SI.shape[0])
            scores_RT[:, target] = torch.bmm(w_RN[:, None], s_RNS)[:, 0]
    own_RT = scores_RT[:, start:]
    hidden_RT = torch.ones(own_RT.shape, dtype=torch.bool, device=own_RT.device).triu_(first_row + 1)
    own_RT.masked_fill_(hidden_RT, float("-inf"))
    return scores_RT

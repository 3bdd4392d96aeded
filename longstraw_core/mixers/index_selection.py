"""Which tokens a query attends to: index scores in tiles, and a top-k whose ties go to the lower position.

score[t, s] = sum over heads of w[t, h] * relu(q[t, h] · k[s] * scale), in fp32; transformers 5.24
modeling_glm_moe_dsa.py, `GlmMoeDsaIndexer`. Scores per head exist for one tile at a time, never as [S, heads, T].
A selection is a table of positions [T, K], ascending in every row. A query that sees at most K tokens selects all of
them; its row is 0 … K-1, in which positions behind the query's own are padding that attention must hide.

A selection follows from the scores and its cut, the lowest selected score and the last position selected at it: eight
bytes per query instead of K positions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from longstraw_core.spec.errors import NumericError

HEAD_SCORES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Scores per head held at once (1 MiB in fp32 on a CPU: within its cache)."""
KEY_TILE = {"cpu": 512, "cuda": 8192}
ROW_SCORES = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Summed scores held at once; bounds the rows of a tile, so that a longer prefix takes no more memory."""


class Cut(NamedTuple):
    """Where the selection of every query ends."""

    scores_S: torch.Tensor
    """Lowest selected score, fp32: everything above it is selected."""
    positions_S: torch.Tensor
    """Last position selected among those whose score is the lowest, int32: ties behind it are not."""


class IndexInputs(NamedTuple):
    """What the scores of a segment's queries are made of."""

    q_TNI: torch.Tensor
    """Index queries [tokens, index heads, index dim], rotated."""
    w_TN: torch.Tensor
    """Weight of every head, fp32."""
    prefix_keys_PI: torch.Tensor
    """Index keys of the resident tokens before the segment."""
    own_keys_TI: torch.Tensor
    """Index keys of the segment's tokens."""
    scale: float
    """Factor of the products before the rectifier."""


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


def lowest_top_k(scores_RT: torch.Tensor, top_k: int) -> tuple[torch.Tensor, Cut]:
    """Return the positions of the `top_k` highest scores of every row, ascending, ties going to the lower position.

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
    positions_RK = positions.view(-1, top_k)
    at_cut_RK = scores_RT.gather(1, positions_RK) == cut_R1
    return positions_RK, Cut(cut_R1[:, 0], (positions_RK * at_cut_RK).amax(-1).to(torch.int32))


@torch.no_grad()
def select_tokens(inputs: IndexInputs, *, top_k: int) -> tuple[torch.Tensor, Cut]:
    """Select `top_k` tokens for every query that sees more than that.

    Returns:
        Absolute positions, int64 [S, top_k], for the segment's rows from `first_selecting_row` on, and their cuts.

    Raises:
        NumericError: a score is not a number.
    """
    device = inputs.q_TNI.device
    found = [lowest_top_k(scores_RT, top_k) for _, scores_RT in _score_tiles(inputs, top_k)]
    if not found:
        nothing = Cut(torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device))
        return torch.empty((0, top_k), dtype=torch.int64, device=device), nothing
    cuts = [cut for _, cut in found]
    cut = Cut(torch.cat([cut.scores_S for cut in cuts]), torch.cat([cut.positions_S for cut in cuts]))
    return torch.cat([positions_RK for positions_RK, _ in found]), cut


@torch.no_grad()
def select_tokens_again(inputs: IndexInputs, cut: Cut, *, top_k: int, name: str) -> torch.Tensor:
    """Return what `select_tokens` selected, from the cut it returned and the same inputs.

    The score at the cut is compared for equality, so an input that differs by an ulp is noticed at once: the query
    then has fewer or more tokens above its cut than it selected.

    Args:
        inputs: as given to `select_tokens`, in the same segment.
        cut: what it returned.
        top_k: tokens selected by every query.
        name: what is selected for, to be named by the error.

    Raises:
        NumericError: a query does not find as many tokens as it selected; names it and what to do.
    """
    start, length = inputs.prefix_keys_PI.shape[0], inputs.q_TNI.shape[0]
    first = first_selecting_row(start, length, top_k)
    selected = []
    for rows, scores_RT in _score_tiles(inputs, top_k):
        recorded = slice(rows.start - first, rows.stop - first)
        score_R1 = cut.scores_S[recorded, None]
        position_T = torch.arange(scores_RT.shape[1], device=scores_RT.device)
        tied_RT = (scores_RT == score_R1) & (position_T <= cut.positions_S[recorded, None])
        chosen_RT = (scores_RT > score_R1) | tied_RT
        counts_R = chosen_RT.sum(-1)
        wrong = (counts_R != top_k).nonzero()[:, 0]
        if wrong.numel():
            raise NumericError(
                f"{name}: token {start + rows.start + int(wrong[0])} finds {int(counts_R[wrong[0]])} of the {top_k} "
                "tokens it selected at capture: scores are computed otherwise here than there. Sweep on the kind of "
                "device and with the threads of the capture, or choose layout.selection_record: positions"
            )
        selected.append(chosen_RT.nonzero()[:, 1].view(-1, top_k))
    if not selected:
        return torch.empty((0, top_k), dtype=torch.int64, device=inputs.q_TNI.device)
    return torch.cat(selected)


def _score_tiles(inputs: IndexInputs, top_k: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the rows that must select, tile by tile, with their scores; every pass over a segment tiles it alike."""
    length = inputs.q_TNI.shape[0]
    start = inputs.prefix_keys_PI.shape[0]
    yield from score_rows(inputs, first_selecting_row(start, length, top_k), length, 0)


def score_rows(inputs: IndexInputs, first: int, last: int, first_key: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield rows [first, last) tile by tile, with their scores; -inf where a query must not look.

    Query t sees all resident keys and the first `first_key` + t + 1 of the others; a tile has a column for every key
    that one of its queries sees.
    """
    length, heads, _ = inputs.q_TNI.shape
    start = inputs.prefix_keys_PI.shape[0]
    device = inputs.q_TNI.device
    rows_by_heads = _limit(HEAD_SCORES, device) // (heads * _limit(KEY_TILE, device))
    step = max(1, min(rows_by_heads, _limit(ROW_SCORES, device) // max(start + length, 1)))
    for begin in range(first, last, step):
        rows = slice(begin, min(begin + step, last))
        yield (
            rows,
            _causal_scores(
                inputs.q_TNI[rows].float(),
                inputs.w_TN[rows],
                inputs.prefix_keys_PI,
                inputs.own_keys_TI,
                first_key + begin,
                inputs.scale,
            ),
        )


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
    start, own = prefix_keys_PI.shape[0], min(max(first_row + rows, 0), own_keys_TI.shape[0])
    scores_RT = torch.empty((rows, start + own), dtype=torch.float32, device=q_RNI.device)
    q = q_RNI.reshape(rows * heads, dim)
    tile = _limit(KEY_TILE, q.device)
    scratch = torch.empty(rows * heads * tile, dtype=torch.float32, device=q.device)
    for keys_SI, offset in ((prefix_keys_PI, 0), (own_keys_TI[:own], start)):
        for begin in range(0, keys_SI.shape[0], tile):
            tile_SI = keys_SI[begin : begin + tile].float()
            s_XS = scratch[: rows * heads * tile_SI.shape[0]].view(rows * heads, -1)
            s_RNS = torch.mm(q, tile_SI.t(), out=s_XS).mul_(scale).relu_().view(rows, heads, -1)
            target = slice(offset + begin, offset + begin + tile_SI.shape[0])
            scores_RT[:, target] = torch.bmm(w_RN[:, None], s_RNS)[:, 0]
    own_RT = scores_RT[:, start:]
    hidden_RT = torch.ones(own_RT.shape, dtype=torch.bool, device=own_RT.device).triu_(first_row + 1)
    own_RT.masked_fill_(hidden_RT, float("-inf"))
    return scores_RT


def _limit(limits: dict[str, int], device: torch.device) -> int:
    return limits.get(device.type, limits["cpu"])

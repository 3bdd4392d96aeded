"""The selection of a segment's queries among the tokens of all ranks: the same tokens as one rank would select.

`queries travel`: every rank scores all queries against the index keys that it owns and sends the owner of each query
its best candidates; the owner takes the best of all, ties to the lower position, and tells all ranks only where it cut
(score and position). `keys travel`: every rank gathers all index keys and selects for its own queries. Which is
cheaper depends on sizes alone (`exchange/volume.py`), so capture and sweep go the same way and score alike.
"""

from typing import NamedTuple

import torch

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.exchange.volume import IndexSizes, index_travels
from longstraw_core.mixers.index_selection import (
    Cut,
    IndexInputs,
    first_selecting_row,
    lowest_top_k,
    score_rows,
    select_tokens,
)
from longstraw_core.mixers.selection import NO_POSITION, all_visible_rows, kept_at_the_end, row_positions


class Selected(NamedTuple):
    """What the owned queries that must select selected."""

    positions_SK: torch.Tensor
    """Absolute positions, int64, ascending."""
    cut: Cut
    rows_XW: torch.Tensor | None
    """What all queries of the segment selected of this rank's rows, as `Selection` wants it, if it is known."""


@torch.no_grad()
def select_across_ranks(inputs: IndexInputs, segment: SegmentOwnership, exchange: Exchange, *, top_k: int) -> Selected:
    """Select `top_k` tokens for every owned query that sees more than that.

    Args:
        inputs: index queries and weights of the owned tokens; index keys of this rank's resident and owned tokens.
        segment: whose tokens are whose.
        exchange: the ranks.
        top_k: tokens to select.

    Raises:
        NumericError: a score is not a number.
    """
    if exchange.alone:
        return Selected(*select_tokens(inputs, top_k=top_k), None)
    heads, dim = inputs.q_TNI.shape[1:]
    sizes = IndexSizes(heads, dim, top_k, inputs.q_TNI.element_size())
    if index_travels(sizes, segment) == "keys":
        return Selected(*select_tokens(_with_all_keys(inputs, segment, exchange), top_k=top_k), None)
    return _by_candidates(inputs, segment, exchange, top_k)


def _with_all_keys(inputs: IndexInputs, segment: SegmentOwnership, exchange: Exchange) -> IndexInputs:
    """All index keys before the owned tokens, as if those were a segment of their own."""
    resident_PI = exchange.gather_rows(inputs.prefix_keys_PI, segment.resident_counts, "resident index keys")
    keys_SI = exchange.gather_rows(inputs.own_keys_TI, segment.counts, "index keys")
    before_PI = torch.cat((segment.in_position_order(resident_PI), keys_SI[: segment.owned.start]))
    return inputs._replace(prefix_keys_PI=before_PI)


def _by_candidates(inputs: IndexInputs, segment: SegmentOwnership, exchange: Exchange, top_k: int) -> Selected:
    device = inputs.q_TNI.device
    first = first_selecting_row(segment.start, segment.tokens, top_k)
    counts = segment.counts_from(first)
    own_first = segment.length - counts[exchange.group.rank]
    q_XNI = exchange.gather_rows(inputs.q_TNI[own_first:], counts, "index queries")
    w_XN = exchange.gather_rows(inputs.w_TN[own_first:], counts, "index weights")
    most_rows = max(a + b for a, b in zip(segment.resident_counts, segment.counts, strict=True))
    candidates = min(top_k, most_rows)

    everyones = inputs._replace(q_TNI=q_XNI, w_TN=w_XN)
    scores_XC, rows_XC = _best_rows(everyones, first - segment.owned.start, candidates)
    positions_R = row_positions(segment).to(device)
    missing_XC = rows_XC < 0
    positions_XC = positions_R[rows_XC.clamp(min=0)] if positions_R.numel() else torch.zeros_like(rows_XC)
    positions_XC = positions_XC.masked_fill(missing_XC, NO_POSITION).to(torch.int32)
    packed_XC2 = torch.stack((scores_XC.view(torch.int32), positions_XC), dim=-1)
    arrived_RSC2 = exchange.to_owners(packed_XC2, counts, "candidates")
    positions_SK, cut = _best_of_all(arrived_RSC2.transpose(0, 1).flatten(1, 2), top_k)

    packed_S2 = torch.stack((cut.scores_S.view(torch.int32), cut.positions_S), dim=-1)
    cuts_X2 = exchange.gather_rows(packed_S2, counts, "cuts")
    cut_scores_X1 = cuts_X2[:, 0].contiguous().view(torch.float32)[:, None]
    tied_XC = (scores_XC == cut_scores_X1) & (positions_XC <= cuts_X2[:, 1:])
    kept_XC = ~missing_XC & ((scores_XC > cut_scores_X1) | tied_XC)
    selecting_XW = kept_at_the_end(rows_XC, kept_XC)
    return Selected(positions_SK, cut, _stacked(all_visible_rows(segment, first, device), selecting_XW))


def _best_rows(inputs: IndexInputs, first_row: int, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and row numbers [X, candidates] of the best of this rank's rows for every query; -inf and -1 for none.

    Args:
        inputs: queries of all ranks, keys of this one.
        first_row: the first query's place counted from this rank's first own token; may be negative.
        candidates: how many to return.
    """
    queries = inputs.q_TNI.shape[0]
    scores_XC = torch.full((queries, candidates), float("-inf"), device=inputs.q_TNI.device)
    rows_XC = torch.full((queries, candidates), -1, device=inputs.q_TNI.device)
    for rows, scores_RT in score_rows(inputs, 0, queries, first_row):
        kept = min(candidates, scores_RT.shape[1])
        if kept == 0:
            continue
        best_RC, _ = lowest_top_k(scores_RT, kept)
        found_RC = scores_RT.gather(1, best_RC)
        scores_XC[rows, :kept] = found_RC
        rows_XC[rows, :kept] = best_RC.masked_fill(found_RC == float("-inf"), -1)
    return scores_XC, rows_XC


def _best_of_all(candidates_SC2: torch.Tensor, top_k: int) -> tuple[torch.Tensor, Cut]:
    """The best `top_k` of all ranks' candidates (score bits, position), ties to the lower position, and their cut."""
    positions_SC, order_SC = candidates_SC2[..., 1].sort(dim=1, stable=True)
    scores_SC = candidates_SC2[..., 0].contiguous().view(torch.float32).gather(1, order_SC)
    if scores_SC.shape[0] == 0:
        nothing = Cut(scores_SC.new_empty(0), positions_SC.new_empty(0))
        return torch.empty((0, top_k), dtype=torch.int64, device=scores_SC.device), nothing
    chosen_SK, cut = lowest_top_k(scores_SC, top_k)
    at_cut_S1 = cut.positions_S[:, None].to(torch.int64)
    return (
        positions_SC.gather(1, chosen_SK).to(torch.int64),
        Cut(cut.scores_S, positions_SC.gather(1, at_cut_S1)[:, 0]),
    )


def _stacked(above_XW: torch.Tensor, below_XW: torch.Tensor) -> torch.Tensor:
    """Put two tables of row numbers above each other, filling the narrower one in front."""
    width = max(above_XW.shape[1], below_XW.shape[1])
    return torch.cat(
        [torch.nn.functional.pad(table, (width - table.shape[1], 0), value=-1) for table in (above_XW, below_XW)]
    )

"""The selection that an index layer made for a segment, as the queries' owner and as the rows' owners need it."""

import torch
import torch.nn.functional as F

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import SegmentOwnership

NO_POSITION = 2**31 - 1
"""Fills tables of positions to a common width; it lies behind every query."""


class Selection:
    """What the owned queries selected, and, once asked for, what all ranks' queries selected of this rank's rows."""

    def __init__(self, positions_TK: torch.Tensor, top_k: int, rows_XW: torch.Tensor | None = None) -> None:
        self.positions_TK = positions_TK
        """Positions selected by the owned queries, int32, ascending; those behind a query's own are padding."""
        self._top_k = top_k
        self._rows_XW = rows_XW

    def rows_of_all_queries(self, exchange: Exchange, segment: SegmentOwnership) -> torch.Tensor:
        """Return row numbers [tokens of the segment, W]: resident rows from 0, then the owned rows; -1 in front.

        When the rows' owners did not make the selection themselves the positions are gathered, once for all layers
        that share it.
        """
        if self._rows_XW is None:
            width = min(self._top_k, segment.start + segment.tokens)
            padded_TK = F.pad(self.positions_TK, (0, width - self.positions_TK.shape[1]), value=NO_POSITION)
            positions_XK = exchange.gather_rows(padded_TK, segment.counts, "selected positions")
            self._rows_XW = rows_of_positions(positions_XK, segment)
        return self._rows_XW


def rows_of_positions(positions_XK: torch.Tensor, segment: SegmentOwnership) -> torch.Tensor:
    """Return which of this rank's rows are among the positions that all queries of the segment selected, [X, W]."""
    device = positions_XK.device
    positions_XK = positions_XK.to(torch.int64)
    held_R = row_positions(segment).to(device)
    if held_R.numel() == 0:
        return positions_XK.new_full((positions_XK.shape[0], 1), -1)
    numbers_XK = torch.searchsorted(held_R, positions_XK).clamp_(max=held_R.numel() - 1)
    query_X1 = torch.arange(segment.start, segment.start + segment.tokens, device=device)[:, None]
    held_XK = (held_R[numbers_XK] == positions_XK) & (positions_XK <= query_X1)
    return kept_at_the_end(numbers_XK, held_XK)


def row_positions(segment: SegmentOwnership) -> torch.Tensor:
    """Absolute positions of this rank's rows: resident ones, then those of the segment; int64, ascending."""
    own = torch.arange(segment.first, segment.first + segment.length)
    return torch.cat((segment.resident_positions, own))


def all_visible_rows(segment: SegmentOwnership, queries: int, device: torch.device) -> torch.Tensor:
    """Return the row numbers that the segment's first `queries` queries see when they select nothing, [queries, W]."""
    own_start = segment.owned.start
    most = segment.resident + min(max(queries - own_start, 0), segment.length)
    query_X1 = torch.arange(queries, device=device)[:, None]
    visible_X1 = segment.resident + (query_X1 + 1 - own_start).clamp(0, segment.length)
    numbers_W = torch.arange(max(most, 1), device=device)
    return kept_at_the_end(numbers_W.expand(queries, -1), numbers_W < visible_X1)


def kept_at_the_end(numbers_XK: torch.Tensor, kept_XK: torch.Tensor) -> torch.Tensor:
    """Return the kept numbers of every row, ascending at the end of as few columns as needed; -1 before them."""
    width = max(int(kept_XK.sum(1).max()) if kept_XK.numel() else 0, 1)
    table_XK = numbers_XK.masked_fill(~kept_XK, -1).sort(dim=1).values
    table_XK = F.pad(table_XK, (max(width - table_XK.shape[1], 0), 0), value=-1)
    return table_XK[:, table_XK.shape[1] - width :].contiguous()

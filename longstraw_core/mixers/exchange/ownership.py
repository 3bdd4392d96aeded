"""The owned part of a segment: which of its tokens are this rank's, and how many resident rows every rank holds."""

from dataclasses import dataclass
from functools import cached_property

import torch

from longstraw_core.resident.ownership import PromptOwnership, owned_counts, owned_slice

__all__ = ["PromptOwnership", "SegmentOwnership", "owned_counts", "owned_slice"]


@dataclass(frozen=True)
class SegmentOwnership:
    """Tokens [start, start + tokens) of a sequence, dealt to the ranks, behind the first `start` tokens of a prompt."""

    prompt: PromptOwnership
    start: int
    tokens: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of the segment that every rank owns."""
        return owned_counts(self.tokens, self.prompt.ranks)

    @cached_property
    def owned(self) -> slice:
        """This rank's tokens, counted from the segment's first."""
        return owned_slice(self.tokens, self.prompt.rank, self.prompt.ranks)

    @cached_property
    def length(self) -> int:
        """Tokens that this rank owns."""
        return self.owned.stop - self.owned.start

    def counts_from(self, first: int) -> tuple[int, ...]:
        """Tokens that every rank owns among those from the segment's token `first` on."""
        slices = [owned_slice(self.tokens, rank, self.prompt.ranks) for rank in range(self.prompt.ranks)]
        return tuple(max(owned.stop - max(owned.start, first), 0) for owned in slices)

    @property
    def first(self) -> int:
        """Absolute position of this rank's first token."""
        return self.start + self.owned.start

    @cached_property
    def resident_counts(self) -> tuple[int, ...]:
        """Resident rows of every rank before the segment; their sum is `start`."""
        return self.prompt.rows_per_rank(self.start)

    @property
    def resident(self) -> int:
        """This rank's resident rows before the segment."""
        return self.resident_counts[self.prompt.rank]

    def in_position_order(self, rows_PX: torch.Tensor) -> torch.Tensor:
        """Put resident rows of all ranks, gathered in rank order, into the order of their positions."""
        if len(self.counts) == 1:
            return rows_PX
        return torch.empty_like(rows_PX).index_copy_(0, self._gathered_positions.to(rows_PX.device), rows_PX)

    def in_rank_order(self, rows_PX: torch.Tensor) -> torch.Tensor:
        """Inverse of `in_position_order`."""
        if len(self.counts) == 1:
            return rows_PX
        return rows_PX.index_select(0, self._gathered_positions.to(rows_PX.device))

    @cached_property
    def _gathered_positions(self) -> torch.Tensor:
        """Absolute positions of the resident rows of all ranks, rank after rank."""
        return torch.cat([self.prompt.positions(self.start, rank=rank) for rank in range(self.prompt.ranks)])

    @cached_property
    def resident_positions(self) -> torch.Tensor:
        """Absolute positions of this rank's resident rows before the segment, int64, ascending."""
        return self.prompt.positions(self.start)

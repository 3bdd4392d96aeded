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

    @cached_property
    def resident_positions(self) -> torch.Tensor:
        """Absolute positions of this rank's resident rows before the segment, int64, ascending."""
        return self.prompt.positions(self.start)

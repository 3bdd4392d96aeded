"""What the state of every layer kind can do; the engine's capture, replay and sweep know only this."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.reshard import Part

Produced = tuple[torch.Tensor, ...]
"""The state tensors that one segment's mixer call produced, in the order its layer state defines."""


class LayerState(Protocol):
    """Resident state of one layer on one rank.

    A page row belongs to one token that this rank owns; a recurrent state has seen the tokens of all ranks.
    """

    @property
    def length(self) -> int:
        """Rows stored, or tokens seen, so far."""
        ...

    def append(self, produced: Produced, token_count: int, *, keep_boundary: bool) -> None:
        """Append what capturing `token_count` tokens, of all ranks, produced; keep the state before them when asked."""
        ...

    def open_sinks(self) -> None:
        """Allocate the fp32 gradient sinks, zeroed."""
        ...

    def close_sinks(self) -> None:
        """Return the sinks."""
        ...

    def take_gradients(self, start: int, end: int) -> Produced:
        """Return the gradients accumulated for what the last chunk in the state, rows [start, end), produced; fp32.

        One per produced tensor; an empty one for a tensor that has no gradient by definition.
        """
        ...

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every block with a name that a person can find it by, for the witness."""
        ...

    def export(self) -> dict[str, torch.Tensor]:
        """Return the tensors to persist, by name."""
        ...

    def restore(self, tensors: dict[str, torch.Tensor], ownership: PromptOwnership) -> None:
        """Fill an empty state from tensors that a rank of the same place and number exported."""
        ...

    def reshard(
        self, parts: Sequence[Part], stored: Sequence[PromptOwnership], wanted: PromptOwnership
    ) -> dict[str, torch.Tensor]:
        """Return what `restore` takes, from what every rank of another number of ranks exported."""
        ...

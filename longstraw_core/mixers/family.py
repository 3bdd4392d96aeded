"""What the engine needs from a model family: layers that mix tokens over resident state. Implemented per family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.exchange.traffic import TrafficMeter
from longstraw_core.mixers.segment import Choices, Segment
from longstraw_core.resident.layer_state import LayerState, Produced
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the resident state of one prompt, by purpose."""

    pages: int
    recurrent: int
    boundaries: int
    """Copies of the recurrent state at chunk boundaries, kept for the reverse sweep."""
    gradient_sinks: int
    choices: int = 0
    """Recorded expert and token choices, kept for the reverse sweep."""

    @property
    def captured(self) -> int:
        """What capture allocates."""
        return self.pages + self.recurrent + self.boundaries + self.choices

    @property
    def total(self) -> int:
        """What capture and, in `exact` mode, the update allocate together."""
        return self.captured + self.gradient_sinks


@dataclass(frozen=True)
class Mixed:
    """Result of one mixer call: its output and the state tensors that the segment produced."""

    y_TH: torch.Tensor | None
    """None when only the state was asked for (the last layer in capture and sweep)."""
    produced: Produced


class Layer(Protocol):
    """One decoder layer of a family, bound to its modules."""

    def mix(self, x_TH: torch.Tensor, segment: Segment, state: LayerState, *, state_only: bool) -> Mixed:
        """Normalise `x_TH` and mix its tokens with the resident ones."""
        ...

    def feed_forward(self, x_TH: torch.Tensor, segment: Segment, state: LayerState) -> torch.Tensor:
        """Normalise `x_TH` and apply the per-token network; a routed one records or replays its choices."""
        ...

    def state_bytes(self, ownership: PromptOwnership, boundaries: int, *, swept: bool) -> StateBytes:
        """Return the bytes of this rank's state of a prompt, with `boundaries` kept boundary copies.

        `swept` says whether what the reverse sweep needs besides them is kept too.
        """
        ...


class Family(Protocol):
    """A causal language model of one family, bound to its modules."""

    vocabulary: int
    max_positions: int
    layers: Sequence[Layer]
    traffic: TrafficMeter
    """What the layers sent to other ranks."""
    embedding: nn.Module
    final_norm: nn.Module
    head: nn.Linear
    dtype: torch.dtype
    device: torch.device
    state_device: torch.device
    """Where resident state is kept: the device, or host memory from which layers are staged one at a time."""

    def segment(
        self,
        ownership: SegmentOwnership,
        *,
        state_gradient: bool,
        choices: Choices = "free",
        prefix_adapted: bool = True,
    ) -> Segment:
        """Return the segment with the rotary angles of its owned tokens, for one pass through the layers."""
        ...

    def new_states(self, pool: ResidentPool, owners: Sequence[str], ownership: PromptOwnership) -> list[LayerState]:
        """Return empty resident states of all layers, for a prompt whose captured tokens are dealt like this."""
        ...

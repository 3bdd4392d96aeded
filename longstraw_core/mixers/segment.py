"""A segment: the run of consecutive tokens that one pass through the layers feeds."""

from dataclasses import dataclass
from typing import Literal

import torch

from longstraw_core.mixers.exchange.ownership import SegmentOwnership

Choices = Literal["free", "record", "reuse"]
"""What a pass does with discrete choices (routed experts, selected tokens): decide, decide and record, or replay."""


@dataclass(frozen=True)
class Segment:
    """The tokens of a sequence, behind those in the resident state, that one pass feeds.

    Every rank feeds the tokens that it owns. Capture, replay and sweep differ only in these flags, never in the code
    that runs.
    """

    ownership: SegmentOwnership
    state_gradient: bool
    """Whether backward adds the gradient of the resident state into its sinks."""
    cos_TD: torch.Tensor
    """Rotary cosines of the owned tokens' positions, fp32, [length, rotary dim]."""
    sin_TD: torch.Tensor
    choices: Choices = "free"
    prefix_adapted: bool = True
    """Whether the adapter acts on the resident tokens too; False in `response_adapter` replay."""

    @property
    def start(self) -> int:
        """Tokens of the sequence before the segment, of all ranks."""
        return self.ownership.start

    @property
    def length(self) -> int:
        """Tokens of the segment that this rank owns: rows of its tensors."""
        return self.ownership.length

    @property
    def resident(self) -> int:
        """Resident rows of this rank before the segment."""
        return self.ownership.resident

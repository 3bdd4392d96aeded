"""A segment: the run of consecutive tokens that one pass through the layers feeds."""

from dataclasses import dataclass
from typing import Literal

import torch

Choices = Literal["free", "record", "reuse"]
"""What a pass does with discrete choices (routed experts, selected tokens): decide, decide and record, or replay."""


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of a sequence whose first `start` tokens are in the resident state.

    Capture, replay and sweep differ only in these flags, never in the code that runs.
    """

    start: int
    length: int
    state_gradient: bool
    """Whether backward adds the gradient of the resident state into its sinks."""
    cos_TD: torch.Tensor
    """Rotary cosines of the segment's positions, fp32, [length, rotary dim]."""
    sin_TD: torch.Tensor
    choices: Choices = "free"
    prefix_adapted: bool = True
    """Whether the adapter acts on the resident tokens too; False in `response_adapter` replay."""

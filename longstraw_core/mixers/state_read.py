"""Reading a resident tensor inside an autograd graph so that its gradient lands in a preallocated sink."""

from typing import Any

import torch


class _ReadWithSink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.sink = sink
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.sink.add_(gradient)
        return None, None


def read_resident(resident: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Return `resident` for use in a graph; backward adds its gradient to `sink` (fp32, same shape) when given."""
    if sink is None or not torch.is_grad_enabled():
        return resident
    return _ReadWithSink.apply(resident.detach().requires_grad_(True), sink)  # type: ignore[return-value]

"""Brings one layer's resident rows from host memory to the device that computes, the next layer's ahead of time.

On a CPU the resident rows are where the arithmetic is: nothing is copied, the interface is the same.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

Key = tuple[Hashable, ...]


class Stager:
    """Holds at most the rows of one layer that were brought ahead of time. One per bound model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: dict[Key, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def prefetch(self, rows: dict[Key, torch.Tensor]) -> None:
        """Start copying rows that will be taken next; rows brought for anything else are dropped."""
        if self._stream is None:
            return
        self._ahead = {key: staged for key, staged in self._ahead.items() if key in rows}
        for key, rows_TD in rows.items():
            if key in self._ahead:
                continue
            with torch.cuda.stream(self._stream):
                staged_TD = rows_TD.to(self.device, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record(self._stream)
                self._ahead[key] = (staged_TD, copied)

    def take(self, key: Key, rows_TD: torch.Tensor) -> torch.Tensor:
        """Return rows on the computing device: themselves on a CPU, the prefetched copy, or a copy made now."""
        if self._stream is None:
            return rows_TD
        if key not in self._ahead:
            return rows_TD.to(self.device, non_blocking=True)
        staged_TD, copied = self._ahead.pop(key)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        staged_TD.record_stream(current)  # its memory must not be reused before the readers are done
        return staged_TD

    @contextmanager
    def accumulate(self, sink_TD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the sink on the computing device for adding to it; afterwards the sink holds the sum."""
        if self._stream is None:
            yield sink_TD
            return
        staged_TD = sink_TD.to(self.device, non_blocking=True)
        yield staged_TD
        sink_TD.copy_(staged_TD)

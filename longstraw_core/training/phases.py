"""Times the phases of an update and notes their peak memory."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch

from longstraw_core.spec.receipts import Phase


def peak_memory_bytes(device: torch.device) -> int:
    """Return the process's peak memory so far: allocated bytes on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PhaseClock:
    """Adds up the seconds spent in named phases, in the order they were first entered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._peak: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as part of `name`."""
        begin = time.perf_counter()
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[name] += time.perf_counter() - begin
            self._peak[name] = peak_memory_bytes(self._device)

    def phases(self) -> tuple[Phase, ...]:
        """Return what was measured, as receipts record it."""
        return tuple(
            Phase(name=name, seconds=seconds, peak_memory_bytes=self._peak[name])
            for name, seconds in self._seconds.items()
        )

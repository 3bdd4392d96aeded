"""Counts the bytes that this rank sends to others, by phase, layer and purpose. The formulas: `volume.py`."""

from collections import defaultdict
from typing import NamedTuple


class Sent(NamedTuple):
    """What some bytes were sent for."""

    phase: str
    """`capture`, `replay` or `reverse_sweep`: the engine's phase that was named last."""
    layer: int
    what: str


class TrafficMeter:
    """One per bound model; every collective adds to it. A rank's copy of its own rows is not traffic."""

    def __init__(self) -> None:
        self.phase = ""
        self._sent: dict[Sent, int] = defaultdict(int)

    def add(self, layer: int, what: str, sent_bytes: int) -> None:
        """Count bytes sent in the current phase."""
        self._sent[Sent(self.phase, layer, what)] += sent_bytes

    def take(self) -> dict[Sent, int]:
        """Return what was counted and start again from nothing."""
        taken, self._sent = dict(self._sent), defaultdict(int)
        return taken

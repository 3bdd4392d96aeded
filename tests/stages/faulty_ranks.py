"""A rank of `train` on which something goes wrong; which, and on which rank, says the environment."""

import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.rank_sessions import Placement, RankSession
from longstraw_core.stages import ranked
from longstraw_core.training import session
from longstraw_core.training.optimizer import AdapterOptimizer
from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.session import TrainingSession

FAULT = "LONGSTRAW_TEST_FAULT"
FAULTY = 1


def execute_rank(request: bytes, ranks: Ranks) -> bytes:
    """The stage on one rank, with the fault."""
    fault = os.environ[FAULT]
    if fault == "device":  # both ranks sit on the same one
        session.observed_placement = lambda at: Placement(  # type: ignore[assignment]
            host=at.planned.host, rank=at.rank, device=str(at.device), accelerator="GPU-7"
        )
    elif ranks.rank == FAULTY:
        _FAULTS[fault]()
    return ranked.execute_rank(request, ranks)


def _drift() -> None:
    """The adapter moves by itself after the step."""
    report = TrainingSession.report

    def drifted(self: TrainingSession, optimizer: AdapterOptimizer) -> RankSession:
        with torch.no_grad():
            next(iter(optimizer.parameters.values())).view(-1)[0] += 1e-6
        return report(self, optimizer)

    TrainingSession.report = drifted  # type: ignore[method-assign]


def _slots() -> None:
    """The rank takes itself for another one."""
    report = TrainingSession.report
    TrainingSession.report = lambda self, optimizer: report(self, optimizer).model_copy(update={"rank": 2})  # type: ignore[method-assign]


def _phases() -> None:
    """The rank sweeps nothing and says so."""
    report = TrainingSession.report

    def shorter(self: TrainingSession, optimizer: AdapterOptimizer) -> RankSession:
        self.sequence.remove("reverse_sweep")
        return report(self, optimizer)

    TrainingSession.report = shorter  # type: ignore[method-assign]


def _order() -> None:
    """The rank loads when it should step."""

    def load_again(self: TrainingSession, *_: Any) -> None:
        with self.phase("load"):
            raise AssertionError("the phase was not refused")

    TrainingSession.witness_gradients = load_again  # type: ignore[method-assign]


def _memory() -> None:
    """The system has no memory left when a response is replayed."""

    def greedy(*_: Any, **__: Any) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        torch.zeros(1 << 28)

    Policy.replay = greedy  # type: ignore[assignment, method-assign]


def _hang() -> None:
    """The rank stops working when a response is replayed, and goes on breathing."""
    Policy.replay = lambda *_, **__: time.sleep(3600)  # type: ignore[assignment, method-assign]


_FAULTS = {"drift": _drift, "slots": _slots, "phases": _phases, "order": _order, "memory": _memory, "hang": _hang}

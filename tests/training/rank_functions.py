"""What the ranks in tests/training/test_launch.py run: some of them end badly."""

import ctypes
import json
import os
import signal
import time

import torch
import torch.distributed as dist

from longstraw_core.spec import DataRefused
from longstraw_core.training.process_groups import Ranks


def sum_of_ranks(request: bytes, ranks: Ranks) -> bytes:
    """Sum the ranks over megatron-core's context-parallel group, gather bytes of different lengths."""
    total = torch.tensor([float(ranks.rank)])
    dist.all_reduce(total, group=ranks.context.process_group)
    gathered = ranks.gather(b"x" * ranks.rank)
    return json.dumps(
        {
            "request": request.decode(),
            "total": float(total),
            "gathered": [len(item) for item in gathered],
            "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
            "experts": ranks.experts.size,
        }
    ).encode()


def fail_on_last(request: bytes, ranks: Ranks) -> None:
    """The last rank ends as the request says while the others wait for it."""
    ranks.enter("replay")
    if request == b"prepare":
        _prepare(ranks)
    if ranks.rank == ranks.size - 1:
        _end(request.decode())
    ranks.gather(b"")


def _prepare(ranks: Ranks) -> None:
    """The first rank cannot prepare what the last one would miss at once, and is slow to say so."""

    def refuse() -> None:
        raise DataRefused("what all need is damaged")

    try:
        ranks.once_per_host(refuse)
    except DataRefused:
        time.sleep(1.0)
        raise
    raise ValueError("what all need is not there")


def _end(how: str) -> None:
    if how == "refuse":
        raise DataRefused("row 7: bad truth")
    if how == "crash":
        raise ValueError("an unexpected value")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "memory":
        torch.empty(1 << 60)
    if how == "disk":
        with open("/dev/full", "wb") as full:
            full.write(b"x")
    if how == "hang":
        time.sleep(3600)
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError(how)


def wait_for_ever(request: bytes, ranks: Ranks) -> None:
    """Leave the process id, then never end."""
    from pathlib import Path

    Path(request.decode(), f"pid-{ranks.rank}").write_text(str(os.getpid()))
    time.sleep(3600)

"""The harness itself: a failing rank is named with its traceback, a hang is bounded, results arrive."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed

from tests.ranks import RankFailed, run_on_ranks


def _sum(rank: int, directory: str) -> None:
    value = torch.tensor([rank + 1])
    torch.distributed.all_reduce(value)
    (Path(directory) / f"{rank}").write_text(str(int(value)))


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    torch.distributed.barrier()


def _one_waits(rank: int) -> None:
    if rank == 0:
        torch.distributed.barrier()
    else:
        time.sleep(300)


def test_ranks_exchange_and_leave_results(tmp_path: Path) -> None:
    run_on_ranks(2, _sum, str(tmp_path), directory=tmp_path / "run")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3", "3"]


def test_a_failing_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1:\n(.|\n)*_one_raises(.|\n)*ValueError: the reason"):
        run_on_ranks(2, _one_raises, directory=tmp_path / "run")


def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"_one_waits"):
        run_on_ranks(2, _one_waits, directory=tmp_path / "run", seconds=5.0)
    assert time.monotonic() - started < 90

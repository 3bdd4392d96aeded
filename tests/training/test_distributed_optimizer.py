"""The update over ranks, by megatron-core, equals the single process's: sums, clipping, AdamW, schedule, state."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw_core.training.launch import run_ranks
from longstraw_core.training.rank_task import RankTask
from tests.training.optimizer_ranks import alone

SHARED = ("a", "b")


def run(function: str, directory: Path, ranks: int, experts: int) -> list[bytes]:
    task = RankTask(
        entry=f"tests.training.optimizer_ranks:{function}",
        request="",
        context_parallel=ranks,
        expert_parallel=experts,
        device="cpu",
        host=socket.gethostname(),
        timeout_seconds=40.0,
    )
    return [result or b"" for result in run_ranks(task, directory)]


def relative(ours: Any, theirs: Any) -> float:
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("ranks", "experts"), [(2, 1), (4, 2)])
def test_five_steps_equal_those_of_one_process_and_resume_exactly(tmp_path: Path, ranks: int, experts: int) -> None:
    expected = alone()
    results = [json.loads(result) for result in run("on_ranks", tmp_path / "meet", ranks, experts)]
    for rank, result in enumerate(results):
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["parameters"].keys() == expected["parameters"].keys()
        assert result["resumed_equal"]
        assert result["rates"][0] == result["rates"][1]
        # experts that are copied: the infinity reaches every rank; sharded ones: the ranks of the same shard
        reached = experts == 1 or rank % experts == 1
        assert result["refusal"].startswith(
            f"gradient of {'mlp.experts.weight' if reached else 'an expert on another rank'} is not finite"
        )
        share = 4 // experts
        held = slice(rank % experts * share, (rank % experts + 1) * share)
        for kind in ("parameters", "moments"):
            for name, value in expected[kind].items():
                wanted = value[held] if "experts" in name else value
                assert relative(result[kind][name], wanted) <= 1e-5, (rank, kind, name)
    assert all(result["parameters"][name] == results[0]["parameters"][name] for result in results for name in SHARED)
    assert max(expected["norms"]) > 0.5, "the gradients must be clipped, or clipping is not compared"

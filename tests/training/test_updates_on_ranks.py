"""Five updates on four ranks: as on one, equal on all ranks, and bit for bit the same when killed in the middle."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw_core.spec import StageFailed
from longstraw_core.spec.rank_sessions import RankSession, RankSessions, check_agreement
from longstraw_core.training.launch import run_ranks
from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.rank_task import RankTask
from tests.engine.oracle import tiny_policy_model
from tests.training.policy_ranks import STEPS, updates

RANKS = 4


def run(function: str, directory: Path, request: str = "") -> list[dict[str, Any]]:
    task = RankTask(
        entry=f"tests.training.policy_ranks:{function}",
        request=request,
        context_parallel=RANKS,
        expert_parallel=1,
        device="cpu",
        host=socket.gethostname(),
        timeout_seconds=60.0,
    )
    return [json.loads(result or b"null") for result in run_ranks(task, directory)]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("five_updates", tmp_path_factory.mktemp("five") / "meet")


def test_five_updates_equal_those_of_one_rank(on_ranks: list[dict[str, Any]]) -> None:
    start = {name: value.detach().flatten() for name, value in _named(tiny_policy_model()).items()}
    alone = updates(tiny_policy_model(), Ranks.alone(), None, 0, STEPS)
    ours, theirs = on_ranks[0], alone
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-3)
    error = moved = 0.0
    for name, value in theirs["adapter"].items():
        expected = torch.tensor(value)
        error += float((torch.tensor(ours["adapter"][name]) - expected).double().pow(2).sum())
        moved += float((expected - start[name]).double().pow(2).sum())
    assert (error / moved) ** 0.5 <= 1e-3


def test_adapters_are_equal_byte_for_byte_on_all_ranks_and_their_sessions_agree(on_ranks: list[dict[str, Any]]) -> None:
    assert len({result["digest"] for result in on_ranks}) == 1
    for step in range(STEPS):
        sessions = tuple(RankSession.model_validate_json(json.dumps(result["sessions"][step])) for result in on_ranks)
        check_agreement(
            RankSessions(run="r", transaction=1, context_parallel=RANKS, expert_parallel=1, sessions=sessions)
        )
        assert sessions[0].before.adapter != sessions[0].after.adapter
        assert sessions[0].phases[0] == "load"
        assert sessions[0].phases[-2:] == ("finalise", "optimizer_step")


def test_killed_after_a_checkpoint_and_continued_equals_never_stopped(
    on_ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match=r"rank 3 of 4 on .*: died in phase"):
        run("stop_after_two", tmp_path / "first", str(tmp_path / "checkpoint"))
    continued = run("continue_to_five", tmp_path / "second", str(tmp_path / "checkpoint"))
    for ours, theirs in zip(continued, on_ranks, strict=True):
        assert ours["digest"] == theirs["digest"]
        assert ours["norms"] == theirs["norms"][2:]
        assert ours["random"] == theirs["random"]
    assert len({result["random"] for result in continued}) == RANKS, "every rank has a random state of its own"


def _named(model: Any) -> dict[str, torch.Tensor]:
    from longstraw_core.training.lora import trainable_parameters

    return dict(trainable_parameters(model))

"""Five updates on ranks: as on one, equal on all ranks, and bit for bit the same when killed in the middle.

Both families on four ranks that share tokens and experts; GLM's experts also on two.
"""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longstraw_core.spec import StageFailed
from longstraw_core.spec.rank_sessions import RankSession, RankSessions, check_agreement
from longstraw_core.training.launch import run_ranks
from longstraw_core.training.lora import trainable_parameters
from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.rank_task import RankTask
from tests.training.policy_ranks import FAMILIES, STEPS, STOPPED_AFTER, Span, load, updates, write_glm

RANKS = 4
CHECKPOINT_FILES = (
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "optimizer.safetensors",
    "trainer_state.json",
)
"""What depends on no layout; random states are kept per rank."""


def run(function: str, folder: Path, ranks: int = RANKS) -> list[Any]:
    task = RankTask(
        entry=f"tests.training.policy_ranks:{function}",
        request=str(folder),
        context_parallel=ranks,
        expert_parallel=ranks,
        device="cpu",
        host=socket.gethostname(),
        timeout_seconds=60.0,
    )
    return [json.loads(result or b"null") for result in run_ranks(task, folder / f"run-{function}")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("updates")
    write_glm(directory)
    return directory


@pytest.fixture(scope="module")
def on_four(folder: Path) -> list[dict[str, Any]]:
    return run("five_updates", folder)


@pytest.fixture(scope="module")
def on_two(folder: Path, on_four: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """GLM only; after four ranks, whose checkpoint it reads."""
    return run("five_elsewhere", folder, ranks=2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return {family: updates(family, folder, Ranks.alone(), Span(save=f"{family}-five-alone")) for family in FAMILIES}


def assert_moved_alike(ours: dict[str, Any], theirs: dict[str, Any], start: dict[str, torch.Tensor]) -> None:
    """Relative L2, of what the updates changed, over all tensors together."""
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-3)
    assert ours["adapter"].keys() == theirs["adapter"].keys() == start.keys()
    error = moved = 0.0
    for name, value in theirs["adapter"].items():
        expected = torch.tensor(value)
        error += float((torch.tensor(ours["adapter"][name]) - expected).double().pow(2).sum())
        moved += float((expected - start[name]).double().pow(2).sum())
    assert (error / moved) ** 0.5 <= 1e-3


def start_of(family: str, folder: Path) -> dict[str, torch.Tensor]:
    model = load(family, folder, Ranks.alone())
    return {name: value.detach().flatten() for name, value in trainable_parameters(model).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_five_updates_equal_those_of_one_rank(
    family: str, folder: Path, on_four: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    assert_moved_alike(on_four[0][family], alone[family], start_of(family, folder))


def test_five_updates_on_two_ranks_equal_those_of_one_too(
    folder: Path, on_two: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    assert_moved_alike(on_two[0]["five"], alone["glm"], start_of("glm", folder))


@pytest.mark.parametrize(("family", "ranks"), [("hybrid", 4), ("glm", 4), ("glm", 2)])
def test_after_each_step_adapters_are_equal_byte_for_byte_on_all_ranks_and_their_sessions_agree(
    family: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    if ranks == RANKS:
        results = [result[family] for result in request.getfixturevalue("on_four")]
    else:
        results = [result["five"] for result in request.getfixturevalue("on_two")]
    for step in range(STEPS):
        assert len({result["digests"][step] for result in results}) == 1
        sessions = tuple(RankSession.model_validate_json(json.dumps(result["sessions"][step])) for result in results)
        check_agreement(
            RankSessions(run="r", transaction=1, context_parallel=ranks, expert_parallel=ranks, sessions=sessions)
        )
        assert sessions[0].before.adapter != sessions[0].after.adapter
        assert sessions[0].phases[0] == "load"
        assert sessions[0].phases[-2:] == ("finalise", "optimizer_step")
        own = {session.after.experts for session in sessions}
        assert own == {None} if family == "hybrid" else len(own) == ranks, "each rank steps experts of its own"


@pytest.fixture(scope="module")
def continued(folder: Path) -> list[dict[str, Any]]:
    with pytest.raises(StageFailed, match=r"rank 3 of 4 on .*: died in phase .*SIGKILL"):
        run("stop_after_two", folder)
    return run("continue_to_five", folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_killed_after_a_checkpoint_and_continued_equals_never_stopped(
    family: str, folder: Path, on_four: list[dict[str, Any]], continued: list[dict[str, Any]]
) -> None:
    for ours, theirs in zip(continued, on_four, strict=True):
        assert ours[family]["digests"] == theirs[family]["digests"][STOPPED_AFTER:]
        assert ours[family]["norms"] == theirs[family]["norms"][STOPPED_AFTER:]
        assert ours[family]["random"] == theirs[family]["random"]
    assert len({result[family]["random"] for result in continued}) == RANKS, "every rank has a random state of its own"
    for name in (*CHECKPOINT_FILES, "random_state.safetensors"):
        ours, theirs = (folder / f"{family}-{which}" / name for which in ("continued", "five-on-4-and-4"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_shared_experts_make_the_checkpoint_of_one_process_which_every_layout_loads(
    folder: Path, on_two: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    shared, single = folder / "glm-five-on-4-and-4", folder / "glm-five-alone"
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(shared / name), load_file(single / name)
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
        error = sum(float((ours[key] - value).double().pow(2).sum()) for key, value in theirs.items())
        assert error <= 1e-6 * sum(float(value.double().pow(2).sum()) for value in theirs.values())
    held = on_two[0]["again"]["held"]
    whole = load_file(shared / "adapter/adapter_model.safetensors")
    assert {tuple(whole[name].shape) != tuple(shape) for name, shape in held.items() if ".experts." in name} == {True}
    again = Span(first=STEPS, load=shared.name, save="glm-again-alone")
    updates("glm", folder, Ranks.alone(), again)
    for name in CHECKPOINT_FILES:
        for loaded in ("glm-again-on-2-and-2", "glm-again-alone"):
            assert (folder / loaded / name).read_bytes() == (shared / name).read_bytes(), (loaded, name)

"""The hybrid on several ranks against conventional full-sequence autograd in one process."""

from pathlib import Path

import pytest
import torch

from tests.engine.oracle import (
    adapter_off_on_prompt,
    detached_prompt_gradients,
    full_gradients,
    full_logprobs,
    tiny_policy_model,
    worst_relative_error,
)
from tests.engine.parallel.cases import Case, read_result, run_cases
from tests.ranks import run_on_ranks

SHAPES = {
    # prompt, response lengths, prompt chunk
    "sizes that divide nothing": (127, (17, 1, 3), 50),
    "a last chunk of one token": (52, (9,), 50),
    "a prompt of one token": (1, (2, 5), 64),
    "two prompt tokens": (2, (3, 1), 64),
    "longer": (301, (61, 2), 96),
}
MODES = ("exact", "stopgrad", "response_adapter")
IN_EVERY_MODE = ("sizes that divide nothing",)
CASES = [
    Case(
        f"{shape}, {mode}, {ranks} ranks, {travels} travel".replace(" ", "-"),
        prompt,
        responses,
        chunk,
        mode,
        ranks,
        travels,
    )
    for shape, (prompt, responses, chunk) in SHAPES.items()
    for mode in (MODES if shape in IN_EVERY_MODE else MODES[:1])
    for ranks in (2, 4)
    for travels in ("queries", "keys")
] + [
    Case("recomputed-layers", 60, (7, 2), 25, "exact", 4, checkpoint_layers=True),
]
RESTORED = [
    Case(
        f"captured-by-{before},-restored-by-{ranks},-{mode}",
        128,
        (17, 1, 3),
        50,
        mode,
        ranks,
        captured_by=before,
    )
    for mode in MODES[:2]
    for before, ranks in ((4, 2), (2, 4), (4, 1), (1, 4))
]
"""127 captured tokens in chunks of 50, 50 and 27: no number of ranks divides them."""
CASES += RESTORED


def _run(rank: int, folder: str) -> None:
    run_cases(rank, tiny_policy_model(), CASES, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(4, _run, str(folder), directory=folder / "run", seconds=600.0)
    return folder


_references: dict[tuple[object, ...], tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = {}


def reference_of(case: Case) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradient and log-probabilities of full sequences; computed once per shape and mode."""
    key = (case.prompt, case.responses, case.mode)
    if key not in _references:
        model, batch = tiny_policy_model(), case.batch
        with torch.no_grad():
            plain = [full_logprobs(model, batch.prompt, response) for response in batch.responses]
        if case.mode == "stopgrad":
            _references[key] = detached_prompt_gradients(model, batch), plain
        elif case.mode == "exact":
            _references[key] = full_gradients(model, batch), plain
        else:
            with adapter_off_on_prompt(model, case.prompt):
                gradient = full_gradients(model, batch)
                with torch.no_grad():
                    masked = [full_logprobs(model, batch.prompt, response) for response in batch.responses]
            _references[key] = gradient, masked
    return _references[key]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_and_gradients_equal_one_process(case: Case, results: Path) -> None:
    ours, our_logprobs = read_result(results, case)
    gradient, logprobs = reference_of(case)
    for ours_R, expected_R in zip(our_logprobs, logprobs, strict=True):
        assert float((ours_R - expected_R).abs().max()) <= 1e-4
    assert worst_relative_error(ours, gradient) <= 1e-4

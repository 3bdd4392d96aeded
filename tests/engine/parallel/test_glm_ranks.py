"""GLM on several context and expert ranks against conventional full-sequence autograd in one process."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.glm_oracle import (
    INDEX_TOP_K,
    adapter_off_on_prompt,
    detached_prompt_gradients,
    tiny_policy_model,
)
from tests.engine.oracle import full_gradients, full_logprobs, worst_relative_error
from tests.engine.parallel.cases import Case, read_result, run_cases
from tests.ranks import run_on_ranks

SHAPES = {
    # prompt, response lengths, prompt chunk
    "sizes that divide nothing": (127, (17, 1, 3), 50),
    "as many tokens as are selected": (INDEX_TOP_K + 1, (3, 2), 7),
    "a prompt of one token": (1, (2, 30), 64),
    "two prompt tokens": (2, (3, 1), 64),
}
MODES = ("exact", "stopgrad", "response_adapter")
IN_EVERY_MODE = ("sizes that divide nothing",)
EXPERTS = {2: (2, 1), 4: (4, 2)}
"""Expert ranks beside context ranks, with queries and with keys travelling."""
CASES = [
    Case(
        f"{shape}, {mode}, {ranks} ranks, {travels} travel".replace(" ", "-"),
        prompt,
        responses,
        chunk,
        mode,
        ranks,
        travels,
        experts=EXPERTS[ranks][travels == "keys"],
    )
    for shape, (prompt, responses, chunk) in SHAPES.items()
    for mode in (MODES if shape in IN_EVERY_MODE else MODES[:1])
    for ranks in (2, 4)
    for travels in ("queries", "keys")
]
CASES += [
    Case("more-expert-ranks,-2-and-4", 60, (7, 2), 25, "exact", 2, experts=4),
    Case("more-expert-ranks,-1-and-4", 60, (7, 2), 25, "exact", 1, experts=4),
    Case("more-expert-ranks,-1-and-2", 60, (7, 2), 25, "stopgrad", 1, experts=2),
    # capture alone would send latents of the last chunk, the sweep alone queries: other sums, and other scores later
    Case("as-bytes-decide", 50, (7, 2), 20, "exact", 4, experts=4),
    Case("one-expert-rank", 60, (7, 2), 25, "exact", 4),
    Case("recorded-positions", 60, (7, 2), 25, "exact", 4, "queries", experts=4, record="positions"),
    Case("recomputed-layers", 60, (7, 2), 25, "exact", 4, checkpoint_layers=True, experts=4),
]
LONGER = Case("longer", 301, (61, 2), 96, "exact", 4, experts=4, record="positions", pinned=True)
CASES += [
    replace(LONGER, name=f"longer,-{ranks}-ranks,-{travels}-travel", ranks=ranks, experts=ranks, travels=travels)
    for ranks in (2, 4)
    for travels in ("queries", "keys")
]
RESTORED = [
    Case(
        f"captured-by-{before},-restored-by-{ranks},-{mode}",
        128,
        (17, 1, 3),
        50,
        mode,
        ranks,
        experts=ranks,
        record="positions",
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
        adapter_off = case.mode == "response_adapter"
        with adapter_off_on_prompt(model, case.prompt) if adapter_off else contextlib.nullcontext():
            gradients = detached_prompt_gradients if case.mode == "stopgrad" else full_gradients
            gradient = gradients(model, batch)
            with torch.no_grad():
                logprobs = [full_logprobs(model, batch.prompt, response) for response in batch.responses]
        _references[key] = gradient, logprobs
    return _references[key]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_and_gradients_equal_one_process(case: Case, results: Path) -> None:
    ours, our_logprobs = read_result(results, case)
    gradient, logprobs = reference_of(case)
    for ours_R, expected_R in zip(our_logprobs, logprobs, strict=True):
        assert float((ours_R - expected_R).abs().max()) <= 1e-4
    assert worst_relative_error(ours, gradient) <= 1e-4

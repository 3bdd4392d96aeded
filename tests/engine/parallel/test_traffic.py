"""Bytes sent and bytes held by every rank, against the formulas of `mixers/exchange/volume.py` and one rank's state."""

from collections import defaultdict
from pathlib import Path

import pytest

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange.ownership import PromptOwnership, SegmentOwnership
from longstraw_core.mixers.exchange.volume import (
    AttentionSizes,
    IndexSizes,
    Volume,
    head_exchange,
    index_keys_travel,
    index_queries_travel,
    keys_travel,
    queries_travel,
)
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine import glm_oracle, oracle
from tests.engine.parallel.cases import Case, read_measured, run_cases
from tests.ranks import run_on_ranks

LAYERS = ("linear_attention", "full_attention", "linear_attention", "full_attention")
HYBRID_SIZES = {"num_attention_heads": 4, "linear_num_key_heads": 4}
"""Four key heads, so that no head is held twice."""
HYBRID = AttentionSizes(heads=4, query_width=32, value_width=32, row_values=2 * 2 * 32, element_bytes=4)
GLM = AttentionSizes(heads=3, query_width=36, value_width=28, row_values=36, element_bytes=4)
INDEX = IndexSizes(heads=32, width=16, selected=glm_oracle.INDEX_TOP_K, element_bytes=4)
INDEX_LAYERS = (0, 3)


def _cases(family: str) -> list[Case]:
    return [
        Case(f"{family}-{prompt}-{ranks}-{travels}", prompt, (17, 1), 50, "exact", ranks, travels)
        for prompt, ranks, travels in (
            *((133, 4, travels) for travels in ("queries", "keys")),
            *((151, ranks, "queries") for ranks in (2, 4)),
            *((301, ranks, "queries") for ranks in (2, 4)),
            (301, 2, "keys"),
        )
    ]


def _run(rank: int, folder: str) -> None:
    run_cases(rank, oracle.tiny_policy_model(LAYERS, **HYBRID_SIZES), _cases("hybrid"), folder)
    run_cases(rank, glm_oracle.tiny_policy_model(), _cases("glm"), folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(4, _run, str(folder), directory=folder / "run", seconds=600.0)
    return folder


def _sent(results: Path, case: Case, rank: int) -> dict[tuple[str, int], int]:
    """Measured bytes by phase and layer."""
    sent: dict[tuple[str, int], int] = defaultdict(int)
    for phase, layer, _, count in read_measured(results, case, rank).sent:
        sent[str(phase), int(layer)] += int(count)
    return sent


def _passes(case: Case, rank: int) -> list[tuple[str, SegmentOwnership, bool]]:
    """Every pass through the layers: phase, segment, and whether it has a backward."""
    prompt = PromptOwnership.chunked(case.prompt - 1, case.chunk, rank=rank, ranks=case.ranks)
    chunks = [SegmentOwnership(prompt, start, min(case.chunk, prompt.tokens - start)) for start in prompt.chunk_starts]
    responses = [SegmentOwnership(prompt, prompt.tokens, tokens) for tokens in case.responses]
    return [
        *(("capture", segment, False) for segment in chunks),
        *(("replay", segment, True) for segment in responses),
        *(("reverse_sweep", segment, True) for segment in chunks),
    ]


def _attention(sizes: AttentionSizes, case: Case, segment: SegmentOwnership) -> Volume:
    if case.travels == "queries":
        return queries_travel(sizes, segment)
    return keys_travel(sizes, segment, state_gradient=True)


@pytest.mark.parametrize("case", _cases("hybrid"), ids=lambda case: case.name)
def test_the_hybrid_sends_what_the_formulas_say(case: Case, results: Path) -> None:
    for rank in range(case.ranks):
        expected: dict[tuple[str, int], int] = defaultdict(int)
        for phase, segment, backward in _passes(case, rank):
            last = len(LAYERS) - 1
            for layer, kind in enumerate(LAYERS):
                if kind == "linear_attention":
                    volume = head_exchange((4 * 16 * 2 + 4 * 12) // case.ranks, 4 // case.ranks, 12, 4, segment)
                elif layer == last and phase != "replay":
                    continue  # nobody reads the last layer's output
                else:
                    volume = _attention(HYBRID, case, segment)
                expected[phase, layer] += volume.total if backward else volume.forward
        measured = _sent(results, case, rank)
        assert {key: count for key, count in measured.items() if key[1] < len(LAYERS)} == expected


@pytest.mark.parametrize("case", _cases("glm"), ids=lambda case: case.name)
def test_glm_sends_what_the_formulas_say(case: Case, results: Path) -> None:
    for rank in range(case.ranks):
        expected: dict[tuple[str, int], int] = defaultdict(int)
        for phase, segment, backward in _passes(case, rank):
            for layer in range(5):
                if layer == 4 and phase != "replay":
                    continue
                volume = _attention(GLM, case, segment)
                expected[phase, layer] += volume.total if backward else volume.forward
                if layer in INDEX_LAYERS:
                    index = index_queries_travel if case.travels == "queries" else index_keys_travel
                    expected[phase, layer] += index(INDEX, segment).forward
        measured = _sent(results, case, rank)
        assert {key: count for key, count in measured.items() if key[1] < 5} == expected


@pytest.mark.parametrize("family", ["hybrid", "glm"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_sends_nothing_that_grows_with_the_prompt_but_its_chunks(family: str, ranks: int, results: Path) -> None:
    """Twice the chunks: twice the sweep, and the same replay; all chunks have the same size."""
    short, long = (
        Case(f"{family}-{prompt}-{ranks}-queries", prompt, (17, 1), 50, "exact", ranks) for prompt in (151, 301)
    )
    for rank in range(ranks):
        of_short, of_long = _sent(results, short, rank), _sent(results, long, rank)
        for phase, layer in of_short:
            factor = 1 if phase == "replay" else 2
            if family == "glm" and layer in INDEX_LAYERS and phase != "replay":
                continue  # the first chunk has tokens that see everything and select nothing
            assert of_long[phase, layer] == factor * of_short[phase, layer]


@pytest.mark.parametrize("family", ["hybrid", "glm"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_of_the_state(family: str, ranks: int, results: Path) -> None:
    case = next(case for case in _cases(family) if case.prompt == 301 and case.ranks == ranks)
    if family == "hybrid":
        model, page_bytes = oracle.tiny_policy_model(LAYERS, **HYBRID_SIZES), 2 * case.page * HYBRID.row_values * 4
    else:
        model, page_bytes = glm_oracle.tiny_policy_model(), case.page * (5 * GLM.row_values + 2 * INDEX.width) * 4
    layout = LayoutSpec(prompt_chunk_tokens=case.chunk, page_tokens=case.page)
    alone = Policy(model, layout, gradient="exact").state_bytes(case.prompt).captured
    for rank in range(ranks):
        measured = read_measured(results, case, rank)
        assert measured.resident_bytes == measured.planned_bytes
        assert measured.resident_bytes <= 1.05 / ranks * alone + page_bytes

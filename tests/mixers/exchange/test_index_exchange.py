"""The selection over several ranks is one rank's, to the last tie."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longstraw_core.mixers.index_selection import first_selecting_row, select_tokens, selection_table
from longstraw_core.mixers.selection import rows_of_positions
from tests.mixers.exchange.ties import SEGMENTS, TOP_K, WAYS, inputs, segment, select_on_rank
from tests.ranks import run_on_ranks

RANKS = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(RANKS, select_on_rank, str(folder), directory=folder / "run")
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SEGMENTS)
def test_every_rank_s_queries_select_what_one_rank_selects(name: str, way: str, results: Path) -> None:
    expected_SK, cut = select_tokens(inputs(segment(name)), top_k=TOP_K)
    parts = [load_file(results / f"ties.{rank}.safetensors") for rank in range(RANKS)]
    assert torch.equal(torch.cat([part[f"{way}.{name}.positions"] for part in parts]), expected_SK)
    assert torch.equal(torch.cat([part[f"{way}.{name}.cut"] for part in parts]), cut.positions_S.to(torch.int64))


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_owners_of_rows_find_the_same_from_the_cut_as_from_the_positions(name: str, results: Path) -> None:
    alone = segment(name)
    expected_SK, _ = select_tokens(inputs(alone), top_k=TOP_K)
    table_TK = selection_table(alone.start, alone.tokens, TOP_K, expected_SK)
    for rank in range(RANKS):
        rows_XW = load_file(results / f"ties.{rank}.safetensors")[f"queries.{name}.rows"]
        of_positions = rows_of_positions(table_TK, segment(name, rank, RANKS))
        for ours, theirs in zip(rows_XW, of_positions, strict=True):
            assert ours[ours >= 0].tolist() == theirs[theirs >= 0].tolist()
            assert (ours.diff()[ours[:-1] >= 0] > 0).all()  # ascending, nothing behind


def test_most_scores_at_the_cut_tie_so_that_the_tests_above_mean_something() -> None:
    dealt = segment("later chunk")
    given = inputs(dealt)
    assert first_selecting_row(dealt.start, dealt.tokens, TOP_K) == 0
    scores = (given.q_TNI @ given.prefix_keys_PI.t()).relu().mul(given.w_TN[..., None]).sum(1)
    lowest = scores.topk(TOP_K).values[:, -1:]
    assert float(((scores == lowest).sum(1) > 2).float().mean()) > 0.9

"""Index selection: the plain definition, ties to the lower position, and independence of tiles and chunks."""

import pytest
import torch

from longstraw_core.mixers import index_selection
from longstraw_core.mixers.index_selection import lowest_top_k, select_tokens, selection_table
from longstraw_core.spec.errors import NumericError


def plain(q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, start: int, top_k: int) -> list[list[int]]:
    """Sort (score, -position) of everything each query sees."""
    scores = torch.einsum("tn,tns->ts", w, torch.einsum("tni,si->tns", q, keys).mul(0.25).relu())
    rows = []
    for row in range(q.shape[0]):
        seen = range(start + row + 1)
        best = sorted(seen, key=lambda position: (-float(scores[row, position]), position))
        rows.append(sorted(best[:top_k]))
    return rows


@pytest.mark.parametrize("start", [0, 3, 40])
@pytest.mark.parametrize("tile", [1, 7, 512])
def test_the_best_visible_tokens_are_selected(monkeypatch: pytest.MonkeyPatch, start: int, tile: int) -> None:
    monkeypatch.setattr(index_selection, "KEY_TILE", tile)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(30, 32, 16, generator=generator)
    w = torch.randn(30, 32, generator=generator)
    keys = torch.randn(start + 30, 16, generator=generator)
    selected = select_tokens(q, w, keys[:start], keys[start:], top_k=9, scale=0.25)
    table = selection_table(start, 30, 9, selected)
    for row, expected in enumerate(plain(q, w, keys, start, 9)):
        visible = [position for position in table[row].tolist() if position <= start + row]
        assert visible == expected


def test_exact_ties_go_to_the_lower_position() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 3.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert lowest_top_k(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_rectified_zeros_tie_and_are_cut_at_the_lower_positions() -> None:
    q = -torch.ones(1, 32, 16)
    keys = torch.ones(20, 16)
    assert select_tokens(q, torch.ones(1, 32), keys[:19], keys[19:], top_k=5, scale=1.0).tolist() == [[0, 1, 2, 3, 4]]


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(NumericError, match="index scores"):
        lowest_top_k(torch.tensor([[float("nan"), 1.0, 2.0]]), 2)

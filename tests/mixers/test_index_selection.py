"""Index selection: the plain definition, ties to the lower position, and independence of tiles and chunks."""

import pytest
import torch

from longstraw_core.mixers import index_selection
from longstraw_core.mixers.index_selection import (
    IndexInputs,
    lowest_top_k,
    select_tokens,
    select_tokens_again,
    selection_table,
)
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


def random_inputs(start: int, length: int) -> IndexInputs:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(length, 32, 16, generator=generator)
    w = torch.randn(length, 32, generator=generator)
    keys = torch.randn(start + length, 16, generator=generator)
    return IndexInputs(q, w, keys[:start], keys[start:], 0.25)


@pytest.mark.parametrize("start", [0, 3, 40])
@pytest.mark.parametrize("tile", [1, 7, 512])
def test_the_best_visible_tokens_are_selected(monkeypatch: pytest.MonkeyPatch, start: int, tile: int) -> None:
    monkeypatch.setitem(index_selection.KEY_TILE, "cpu", tile)
    inputs = random_inputs(start, 30)
    selected, _ = select_tokens(inputs, top_k=9)
    table = selection_table(start, 30, 9, selected)
    keys = torch.cat((inputs.prefix_keys_PI, inputs.own_keys_TI))
    for row, expected in enumerate(plain(inputs.q_TNI, inputs.w_TN, keys, start, 9)):
        visible = [position for position in table[row].tolist() if position <= start + row]
        assert visible == expected


def test_exact_ties_go_to_the_lower_position() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 3.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    positions, cut = lowest_top_k(scores, 4)
    assert positions.tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]
    assert (cut.scores_S.tolist(), cut.positions_S.tolist()) == ([0.0, 1.0], [2, 3])


def test_rectified_zeros_tie_and_are_cut_at_the_lower_positions() -> None:
    keys = torch.ones(20, 16)
    inputs = IndexInputs(-torch.ones(1, 32, 16), torch.ones(1, 32), keys[:19], keys[19:], 1.0)
    selected, cut = select_tokens(inputs, top_k=5)
    assert selected.tolist() == [[0, 1, 2, 3, 4]]
    assert torch.equal(select_tokens_again(inputs, cut, top_k=5, name="layer 0"), selected)


@pytest.mark.parametrize("start", [0, 3, 40, 700])
@pytest.mark.parametrize("top_k", [1, 9, 64])
def test_the_cut_gives_back_exactly_what_was_selected(start: int, top_k: int) -> None:
    inputs = random_inputs(start, 50)
    rounded = inputs._replace(q_TNI=inputs.q_TNI.round(), prefix_keys_PI=inputs.prefix_keys_PI.round())
    for given in (inputs, rounded):  # the rounded ones tie often
        selected, cut = select_tokens(given, top_k=top_k)
        assert torch.equal(select_tokens_again(given, cut, top_k=top_k, name="layer 0"), selected)


def test_a_score_that_moved_by_one_ulp_under_the_cut_is_noticed() -> None:
    inputs = random_inputs(40, 30)
    _, cut = select_tokens(inputs, top_k=9)
    moved = cut.scores_S.clone()
    moved[17] = torch.nextafter(moved[17], torch.tensor(torch.inf))
    with pytest.raises(NumericError, match=r"layer 6: token 57 finds 8 of the 9 tokens.*selection_record"):
        select_tokens_again(inputs, cut._replace(scores_S=moved), top_k=9, name="layer 6")


def test_a_score_that_rose_over_the_cut_is_noticed() -> None:
    inputs = random_inputs(40, 30)
    _, cut = select_tokens(inputs, top_k=9)
    _, next_cut = select_tokens(inputs, top_k=10)
    moved = cut.scores_S.clone()
    moved[17] = next_cut.scores_S[17]
    positions = torch.full_like(cut.positions_S, 70)
    with pytest.raises(NumericError, match=r"layer 6: token 57 finds 10 of the 9 tokens"):
        select_tokens_again(inputs, cut._replace(scores_S=moved, positions_S=positions), top_k=9, name="layer 6")


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(NumericError, match="index scores"):
        lowest_top_k(torch.tensor([[float("nan"), 1.0, 2.0]]), 2)

"""Who owns which token: every token exactly once, shares even, order kept, whatever divides nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstraw_core.resident.ownership import PromptOwnership, owned_counts, owned_slice


@given(tokens=st.integers(0, 200), ranks=st.integers(1, 33))
def test_a_run_is_split_evenly_in_order_and_every_token_is_owned_once(tokens: int, ranks: int) -> None:
    shares = [range(tokens)[owned_slice(tokens, rank, ranks)] for rank in range(ranks)]
    assert [token for share in shares for token in share] == list(range(tokens))
    assert tuple(map(len, shares)) == owned_counts(tokens, ranks)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(tokens=st.integers(0, 120), chunk=st.integers(1, 50), ranks=st.integers(1, 9), end=st.integers(0, 130))
def test_rows_of_a_prefix_are_its_owned_positions(tokens: int, chunk: int, ranks: int, end: int) -> None:
    of_rank = [PromptOwnership.chunked(tokens, chunk, rank=rank, ranks=ranks) for rank in range(ranks)]
    positions = [ownership.positions(end).tolist() for ownership in of_rank]
    assert sorted(position for of_one in positions for position in of_one) == list(range(min(tokens, end)))
    assert all(of_one == sorted(of_one) for of_one in positions)
    assert tuple(map(len, positions)) == of_rank[0].rows_per_rank(end)
    assert [ownership.rows(end) for ownership in of_rank] == list(map(len, positions))
    assert all(torch.equal(of_rank[0].positions(end, rank=r), torch.tensor(p).long()) for r, p in enumerate(positions))


def test_a_prefix_is_balanced_because_it_is_dealt_chunk_by_chunk() -> None:
    counts = PromptOwnership.chunked(1000, 100, ranks=4).rows_per_rank(700)
    assert counts == (175, 175, 175, 175)


@pytest.mark.parametrize(("ranks", "expected"), [(1, (3,)), (2, (2, 1)), (4, (1, 1, 1, 0))])
def test_the_first_ranks_own_what_remains(ranks: int, expected: tuple[int, ...]) -> None:
    assert owned_counts(3, ranks) == expected

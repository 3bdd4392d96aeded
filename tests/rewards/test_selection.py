"""The order of rows over transactions and epochs."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_core.rewards.selection import select_rows
from longstraw_core.spec import DataRefused


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(1, 12))
    return count, draw(st.integers(1, count))


@given(sizes(), st.integers(0, 2**53 - 1), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_row_twice_in_a_transaction_and_every_row_once_per_epoch(
    size: tuple[int, int], seed: int, shuffle: bool
) -> None:
    count, per_transaction = size
    stream: list[int] = []
    for transaction in range(1, 3 * count + 1):
        chosen = select_rows(
            count, per_transaction=per_transaction, transaction=transaction, seed=seed, shuffle=shuffle
        )
        assert len(set(chosen.indices)) == per_transaction
        assert chosen.position == len(stream)
        assert chosen.epoch == len(stream) // count
        stream += chosen.indices
    for start in range(0, len(stream) - count + 1, count):
        assert sorted(stream[start : start + count]) == list(range(count))


def test_the_order_is_frozen() -> None:
    """These numbers may never change: a resumed run continues an order made by an older version."""
    chosen = [
        select_rows(7, per_transaction=3, transaction=transaction, seed=1, shuffle=True).indices
        for transaction in range(1, 6)
    ]
    assert chosen == FROZEN


FROZEN = [(0, 2, 5), (1, 6, 4), (3, 0, 6), (2, 5, 1), (3, 4, 6)]


def test_seeds_that_a_double_cannot_hold_apart_give_different_orders() -> None:
    first, second = (
        select_rows(50, per_transaction=50, transaction=1, seed=seed, shuffle=True).indices
        for seed in (9007199254740992, 9007199254740993)
    )
    assert first != second


def test_epochs_differ_and_file_order_is_kept_without_shuffling() -> None:
    def epoch(number: int, shuffle: bool) -> tuple[int, ...]:
        return select_rows(30, per_transaction=30, transaction=number, seed=0, shuffle=shuffle).indices

    assert epoch(1, True) != epoch(2, True)
    assert epoch(1, False) == epoch(2, False) == tuple(range(30))


def test_first_places_are_spread_evenly_over_rows() -> None:
    firsts = Counter(
        select_rows(4, per_transaction=1, transaction=1, seed=seed, shuffle=True).indices[0] for seed in range(2000)
    )
    assert all(400 < firsts[row] < 600 for row in range(4))


def test_fewer_rows_than_a_transaction_needs_are_refused() -> None:
    with pytest.raises(DataRefused, match="3 usable rows"):
        select_rows(3, per_transaction=4, transaction=1, seed=0, shuffle=True)
    with pytest.raises(DataRefused, match="0 usable rows"):
        select_rows(0, per_transaction=1, transaction=1, seed=0, shuffle=True)

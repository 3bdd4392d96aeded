"""Which heads and channels a rank holds, and numbers of ranks that are refused before anything runs."""

import pytest

from longstraw_core.mixers.exchange.head_shard import HeadSizes, held_heads
from longstraw_core.spec.errors import SpecError

SIZES = HeadSizes(key_heads=2, value_heads=8, key_dim=3, value_dim=5)


def test_value_heads_are_divided_in_order_and_bring_their_key_heads() -> None:
    held = [held_heads(SIZES, rank, 4) for rank in range(4)]
    assert [list(heads.value) for heads in held] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(heads.key) for heads in held] == [[0], [0], [1], [1]]


def test_channels_of_all_ranks_are_the_layer_s_once_unless_a_key_head_is_shared() -> None:
    apart = sorted(channel for rank in range(2) for channel in held_heads(SIZES, rank, 2).channels(SIZES))
    assert apart == list(range(SIZES.channels))
    shared = [channel for rank in range(4) for channel in held_heads(SIZES, rank, 4).channels(SIZES)]
    keys = range(2 * SIZES.key_heads * SIZES.key_dim)
    assert all(shared.count(channel) == (2 if channel in keys else 1) for channel in range(SIZES.channels))
    assert held_heads(SIZES, 3, 4).sizes(SIZES).channels == len(held_heads(SIZES, 3, 4).channels(SIZES))


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        (SIZES, 3, "context parallel size 3 does not divide the 8 value heads"),
        (HeadSizes(2, 6, 3, 5), 3, "context parallel size 3 neither divides the 2 key heads"),
        (HeadSizes(16, 48, 128, 128), 32, "context parallel size 32 does not divide the 48 value heads"),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(sizes: HeadSizes, ranks: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        held_heads(sizes, 0, ranks)

"""What travels, from bytes alone: thresholds at the sizes of the two model families."""

import pytest

from longstraw_core.mixers.exchange.ownership import PromptOwnership, SegmentOwnership
from longstraw_core.mixers.exchange.volume import (
    AttentionSizes,
    IndexSizes,
    Travels,
    attention_travels,
    index_travels,
    keys_travel,
    queries_travel,
    swept_attention_travels,
)

MIB = 1 << 20
QWEN = AttentionSizes(heads=24, query_width=256, value_width=256, row_values=2 * 4 * 256, element_bytes=2)
GLM = AttentionSizes(heads=64, query_width=576, value_width=512, row_values=576, element_bytes=2)


def segment(start: int, tokens: int, ranks: int, rank: int = 0) -> SegmentOwnership:
    return SegmentOwnership(PromptOwnership.chunked(start, 8192, rank=rank, ranks=ranks), start, tokens)


def test_bytes_at_real_sizes() -> None:
    """253 and 1402 MiB: the figures of a measured prototype at 8 ranks and 8192 tokens."""
    assert queries_travel(QWEN, segment(131072, 8192, 8)).forward / MIB == pytest.approx(252.7, abs=0.1)
    assert queries_travel(GLM, segment(131072, 8192, 8)).forward / MIB == pytest.approx(1401.8, abs=0.1)
    keys = keys_travel(GLM, segment(1 << 20, 8192, 8), state_gradient=False)
    assert keys.forward / MIB == pytest.approx((1 << 20) * 1152 * 7 / 8 / MIB, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "start", "tokens", "backward", "expected"),
    [
        (GLM, 131_072, 8192, False, "keys"),
        (GLM, 2_097_152, 8192, False, "queries"),
        (GLM, 131_072, 2048, True, "keys"),
        (GLM, 1_048_576, 2048, True, "queries"),
        (QWEN, 8_192, 8192, False, "keys"),
        (QWEN, 131_072, 8192, False, "queries"),
        (QWEN, 131_072, 2048, True, "queries"),
    ],
)
def test_short_segments_behind_long_prefixes_send_queries(
    sizes: AttentionSizes, start: int, tokens: int, backward: bool, expected: Travels
) -> None:
    for rank in (0, 7):  # all ranks choose alike
        behind = segment(start, tokens, 8, rank)
        assert attention_travels(sizes, behind, state_gradient=backward, backward=backward) == expected


def test_a_chunk_that_is_captured_and_swept_travels_alike_both_times() -> None:
    """Each for itself would choose otherwise at 900,000 tokens: bytes of both together decide."""
    for start, expected in ((900_000, "keys"), (1_000_000, "queries")):
        chunk = segment(start, 8192, 32)
        assert attention_travels(GLM, chunk, state_gradient=False, backward=False) == "keys"
        assert attention_travels(GLM, chunk, state_gradient=True, backward=True) == "queries"
        assert swept_attention_travels(GLM, chunk) == expected
        keys, queries = keys_travel(GLM, chunk, state_gradient=True), queries_travel(GLM, chunk)
        together = [2 * volume.forward + volume.backward for volume in (keys, queries)]
        assert together.index(min(together)) == ["keys", "queries"].index(expected)


def test_the_index_gathers_keys_of_short_prefixes() -> None:
    sizes = IndexSizes(heads=32, width=128, selected=2048, element_bytes=2)
    assert index_travels(sizes, segment(131_072, 8192, 32)) == "keys"
    assert index_travels(sizes, segment(1_048_576, 8192, 32)) == "queries"

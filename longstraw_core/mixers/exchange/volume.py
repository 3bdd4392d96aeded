"""Bytes that a rank sends for one layer's exchange, from sizes alone, and the choice of what travels.

With n the tokens of the segment, T the resident tokens before it, N the ranks, o this rank's tokens of the segment and
ceil(n / N) the largest share, e the bytes of an element in the model's dtype:

attention over pages, queries travel (H heads, query width Q, value width V):
    forward    ceil(n/N) (N-1) H Q e  +  (n - o) H (V + 1) 4
    backward   ceil(n/N) (N-1) H ((Q + V) e + 8)  +  (n - o) H Q 4
attention over pages, keys travel (row of b bytes and w values; t resident rows here, t* the most of any rank):
    forward    (t* + ceil(n/N)) (N-1) b
    backward   (t* + ceil(n/N)) (N-1) b  +  (n - o) w 4  +  (T - t) w 4 if the resident rows need a gradient
latents and selected rows: the same with the partials of absorbed queries; when their positions must be told to the
rows' owners (s the largest share, K selected): s (N-1) K 4, once for all layers that share a selection
index, queries travel (n', o', s' of the tokens that must select; I heads of width J; K selected, c = min(K, most rows
of any rank) candidates):
    forward    s' (N-1) (I (J e + 4) + 8)  +  (n' - o') c 8
index, keys travel:
    forward    (t* + ceil(n/N)) (N-1) J e
gated delta net, C channels and V value heads of dimension D held per rank:
    forward    (N-1) o (C + 2 V) e  +  (n - o) V D e
    backward   (n - o) (C + 2 V) e  +  (N-1) o V D e

Queries cost in proportion to the segment, keys to the prefix too: short segments behind long prefixes send queries.
Nothing here depends on the prompt's length when queries travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from longstraw_core.mixers.exchange.ownership import SegmentOwnership

Travels = Literal["queries", "keys"]


@dataclass(frozen=True)
class AttentionSizes:
    """What of one attention layer decides how much travels."""

    heads: int
    query_width: int
    value_width: int
    row_values: int
    """Values of a resident row: keys and values of all key heads, or latent and rope key."""
    element_bytes: int


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends in one layer."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.forward + self.backward


def queries_travel(sizes: AttentionSizes, segment: SegmentOwnership) -> Volume:
    """Bytes when queries are gathered and partial results return to their owners."""
    gathered = max(segment.counts) * (segment.prompt.ranks - 1) * sizes.heads
    returned = (segment.tokens - segment.length) * sizes.heads
    return Volume(
        forward=gathered * sizes.query_width * sizes.element_bytes + returned * (sizes.value_width + 1) * 4,
        backward=gathered * ((sizes.query_width + sizes.value_width) * sizes.element_bytes + 8)
        + returned * sizes.query_width * 4,
    )


def keys_travel(sizes: AttentionSizes, segment: SegmentOwnership, *, state_gradient: bool) -> Volume:
    """Bytes when resident rows and the segment's own are gathered and their gradients return to their owners."""
    rows = max(segment.resident_counts) + max(segment.counts)
    gathered = rows * (segment.prompt.ranks - 1) * sizes.row_values * sizes.element_bytes
    returned = segment.tokens - segment.length
    if state_gradient:
        returned += segment.start - segment.resident
    return Volume(forward=gathered, backward=gathered + returned * sizes.row_values * 4)


def head_exchange(channels: int, heads: int, head_dim: int, element_bytes: int, segment: SegmentOwnership) -> Volume:
    """Bytes of the gated delta net's way to the heads and back; `channels` and `heads` are those held per rank."""
    to_others = (segment.prompt.ranks - 1) * segment.length
    of_others = segment.tokens - segment.length
    wide, narrow = channels + 2 * heads, heads * head_dim
    return Volume(
        forward=(to_others * wide + of_others * narrow) * element_bytes,
        backward=(of_others * wide + to_others * narrow) * element_bytes,
    )


@dataclass(frozen=True)
class IndexSizes:
    """What of an index layer decides how much travels."""

    heads: int
    width: int
    selected: int
    element_bytes: int


def index_queries_travel(sizes: IndexSizes, segment: SegmentOwnership) -> Volume:
    """Bytes when index queries are gathered, candidates return to the queries' owners and cuts are gathered."""
    first = min(max(sizes.selected - segment.start, 0), segment.tokens)
    counts = segment.counts_from(first)
    gathered = max(counts) * (segment.prompt.ranks - 1)
    most_rows = max(a + b for a, b in zip(segment.resident_counts, segment.counts, strict=True))
    returned = (sum(counts) - counts[segment.prompt.rank]) * min(sizes.selected, most_rows)
    return Volume(gathered * (sizes.heads * (sizes.width * sizes.element_bytes + 4) + 8) + returned * 8, 0)


def index_keys_travel(sizes: IndexSizes, segment: SegmentOwnership) -> Volume:
    """Bytes when index keys are gathered."""
    rows = max(segment.resident_counts) + max(segment.counts)
    return Volume(rows * (segment.prompt.ranks - 1) * sizes.width * sizes.element_bytes, 0)


def index_travels(sizes: IndexSizes, segment: SegmentOwnership) -> Travels:
    """Return what should travel in an index layer; the same on every rank and in every phase."""
    segment = largest_share(segment)
    return cheaper(index_queries_travel(sizes, segment), index_keys_travel(sizes, segment), backward=False)


def cheaper(queries: Volume, keys: Volume, *, backward: bool) -> Travels:
    """Return what should travel; a pass without autograd has no backward to pay for. Ties go to the queries."""
    if backward:
        return "queries" if queries.total <= keys.total else "keys"
    return "queries" if queries.forward <= keys.forward else "keys"


def attention_travels(
    sizes: AttentionSizes, segment: SegmentOwnership, *, state_gradient: bool, backward: bool
) -> Travels:
    """Return what should travel in one layer of one pass; the same on every rank."""
    segment = largest_share(segment)
    keys = keys_travel(sizes, segment, state_gradient=state_gradient)
    return cheaper(queries_travel(sizes, segment), keys, backward=backward)


def swept_attention_travels(sizes: AttentionSizes, segment: SegmentOwnership) -> Travels:
    """Return what should travel in one layer of a chunk that is captured now and swept later; the same for both.

    The two ways round differently. Where a later layer selects tokens by score, capture and sweep must reach the same
    bits, so that one choice is made for what they send together: forward twice and backward once.
    """
    segment = largest_share(segment)
    queries = queries_travel(sizes, segment)
    keys = keys_travel(sizes, segment, state_gradient=True)
    return cheaper(_forward_again(queries), _forward_again(keys), backward=True)


def _forward_again(volume: Volume) -> Volume:
    return Volume(2 * volume.forward, volume.backward)


def largest_share(segment: SegmentOwnership) -> SegmentOwnership:
    """The segment as rank 0 sees it: all ranks must choose alike, so the choice looks at one rank's bytes."""
    prompt = segment.prompt
    return SegmentOwnership(
        type(prompt)(prompt.chunk_starts, prompt.tokens, 0, prompt.ranks), segment.start, segment.tokens
    )


def total(volumes: Sequence[Volume]) -> Volume:
    """Sum of several layers."""
    return Volume(sum(volume.forward for volume in volumes), sum(volume.backward for volume in volumes))


def gathered_weights(share_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends when a layer whose weights are shared becomes whole: its share, to every other rank.

    A layer becomes whole when it is used and another one was used before. A pass without a backward uses every layer
    once; one with a backward uses them again in reverse order, so that the last one is there already.
    """
    return share_bytes * (ranks - 1)

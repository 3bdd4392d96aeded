"""Which heads of a gated delta net a rank holds, and the way of its tokens to the heads and back.

A recurrent layer cannot be split by tokens without a serial wait, but its heads are independent: every rank runs all
tokens of a segment for its heads. Of V value heads over N ranks, rank r holds [r V / N, (r + 1) V / N) and the key
heads that they read; with more ranks than key heads a key head is held by several ranks, whose gradients add.
"""

from dataclasses import dataclass

import torch

from longstraw_core.mixers.exchange.collectives import Exchange, exchanged_rows
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.spec.errors import SpecError


@dataclass(frozen=True)
class HeadSizes:
    """Heads and channels of one layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Per head; `value_dim` too."""
    value_dim: int

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class HeldHeads:
    """The heads of one rank."""

    key: range
    value: range

    def sizes(self, whole: HeadSizes) -> HeadSizes:
        """Heads and channels of the part that is held."""
        return HeadSizes(len(self.key), len(self.value), whole.key_dim, whole.value_dim)

    def channels(self, whole: HeadSizes) -> list[int]:
        """Channels of queries, keys and values that belong to these heads, of the whole layer's."""
        keys = whole.key_heads * whole.key_dim

        def of(first: int, heads: range, width: int) -> range:
            return range(first + heads.start * width, first + heads.stop * width)

        return [
            *of(0, self.key, whole.key_dim),
            *of(keys, self.key, whole.key_dim),
            *of(2 * keys, self.value, whole.value_dim),
        ]


def held_heads(sizes: HeadSizes, rank: int, ranks: int) -> HeldHeads:
    """Return the heads of `rank`.

    Raises:
        SpecError: the value heads cannot be divided evenly, or the key heads neither divided nor shared evenly.
    """
    if sizes.value_heads % ranks:
        raise SpecError(
            f"context parallel size {ranks} does not divide the {sizes.value_heads} value heads of the linear "
            "attention layers: choose a divisor"
        )
    if sizes.key_heads % ranks and ranks % sizes.key_heads:
        raise SpecError(
            f"context parallel size {ranks} neither divides the {sizes.key_heads} key heads of the linear attention "
            "layers nor is a multiple of them: choose another"
        )
    held = sizes.value_heads // ranks
    value = range(rank * held, (rank + 1) * held)
    per_key = sizes.value_heads // sizes.key_heads
    return HeldHeads(range(value.start // per_key, (value.stop - 1) // per_key + 1), value)


class HeadExchange:
    """Moves a segment between owned tokens of all heads and all tokens of held heads."""

    def __init__(self, exchange: Exchange, sizes: HeadSizes) -> None:
        group = exchange.group
        self._exchange = exchange
        self.held = held_heads(sizes, group.rank, group.size)
        self.sizes = self.held.sizes(sizes)
        self._columns: torch.Tensor | None = None
        self._whole = sizes

    def channels(self, device: torch.device) -> torch.Tensor | None:
        """Channels of the held heads, int64, or None when all are held."""
        if self._exchange.alone:
            return None
        return torch.tensor(self.held.channels(self._whole), device=device)

    def to_heads(
        self, mixed_TC: torch.Tensor, beta_TV: torch.Tensor, decay_TV: torch.Tensor, ownership: SegmentOwnership
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return channels, write strengths and decays of the held heads for all tokens, from those of owned tokens."""
        if self._exchange.alone:
            return mixed_TC, beta_TV, decay_TV
        ranks, owned = self._exchange.group.size, ownership.length
        columns = self._all_columns(mixed_TC.device)
        width = columns.shape[0] // ranks
        by_rank = torch.cat((mixed_TC, beta_TV, decay_TV), dim=1).index_select(1, columns).view(owned, ranks, width)
        arrived_TX = exchanged_rows(
            by_rank.transpose(0, 1).reshape(ranks * owned, width),
            self._exchange,
            [owned] * ranks,
            ownership.counts,
            "tokens to heads",
        )
        heads = self.sizes.value_heads
        return arrived_TX.split((width - 2 * heads, heads, heads), dim=1)  # type: ignore[return-value]

    def to_tokens(self, out_TX: torch.Tensor, ownership: SegmentOwnership) -> torch.Tensor:
        """Return outputs of all heads [owned tokens, all values] from those of held heads [all tokens, held values]."""
        if self._exchange.alone:
            return out_TX
        ranks, owned, width = self._exchange.group.size, ownership.length, out_TX.shape[1]
        arrived = exchanged_rows(out_TX, self._exchange, ownership.counts, [owned] * ranks, "heads to tokens")
        return arrived.view(ranks, owned, width).transpose(0, 1).reshape(owned, ranks * width)

    def _all_columns(self, device: torch.device) -> torch.Tensor:
        """Columns of (channels, write strengths, decays) that each rank needs, rank after rank."""
        if self._columns is None:
            whole, columns = self._whole, []
            for rank in range(self._exchange.group.size):
                held = held_heads(whole, rank, self._exchange.group.size)
                columns += held.channels(whole)
                columns += [whole.channels + head for head in held.value]
                columns += [whole.channels + whole.value_heads + head for head in held.value]
            self._columns = torch.tensor(columns, device=device)
        return self._columns

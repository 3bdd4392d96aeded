"""Exchanges of rows between the ranks of one group, with and without autograd. Every byte sent is counted.

Rows of a segment are owned in rank order, `counts` rows per rank, so a gathered tensor is in token order. Every rank
must make the same calls in the same order: a rank without rows makes them with tensors of no rows. Sums over ranks are
made by the owner of a row, in fp32 and in rank order, so that they are the same in every run.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.mixers.exchange.traffic import TrafficMeter


class Exchange:
    """One layer's access to a group."""

    def __init__(self, group: RankGroup, meter: TrafficMeter, layer: int) -> None:
        self.group = group
        self._meter = meter
        self._layer = layer

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        return self.group.size == 1

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int], what: str) -> torch.Tensor:
        """Return the rows of all ranks in rank order, [sum(counts), ...], from this rank's `counts[rank]` rows.

        Shares are padded to the largest: every rank sends max(counts) rows to every other one.
        """
        if self.alone:
            return x
        largest = max(counts)
        row = _row_bytes(x)
        padded = torch.zeros((largest, row), dtype=torch.uint8, device=x.device)
        padded[: x.shape[0]] = _as_bytes(x)
        gathered = padded.new_empty((self.group.size * largest, row))
        torch.distributed.all_gather_into_tensor(gathered, padded, group=self.group.process_group)
        self._meter.add(self._layer, what, (self.group.size - 1) * largest * row)
        if min(counts) != largest:
            parts = gathered.split(largest)
            gathered = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return _from_bytes(gathered, x)

    def gather_into(self, out: torch.Tensor, share: torch.Tensor, what: str) -> None:
        """Fill flat `out` with the equal flat shares of all ranks, in rank order."""
        if self.alone:
            out.copy_(share)
            return
        torch.distributed.all_gather_into_tensor(
            out.view(torch.uint8), share.view(torch.uint8), group=self.group.process_group
        )
        self._meter.add(self._layer, what, (self.group.size - 1) * share.nbytes)

    def exchange_rows(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> torch.Tensor:
        """Send consecutive runs of `send[rank]` rows to the ranks; return the received ones in rank order."""
        if self.alone:
            return x
        data = _as_bytes(x).contiguous()
        received = data.new_empty((sum(receive), data.shape[1]))
        torch.distributed.all_to_all_single(received, data, list(receive), list(send), group=self.group.process_group)
        self._meter.add(self._layer, what, (sum(send) - send[self.group.rank]) * data.shape[1])
        return _from_bytes(received, x)

    def to_owners(self, partials: torch.Tensor, counts: Sequence[int], what: str) -> torch.Tensor:
        """Return every rank's partial of the rows this rank owns, [ranks, owned, ...], from partials of all rows."""
        owned = counts[self.group.rank]
        received = self.exchange_rows(partials, counts, [owned] * self.group.size, what)
        return received.view(self.group.size, owned, *partials.shape[1:])

    def exchange_counts(self, counts_MX: torch.Tensor, what: str) -> torch.Tensor:
        """Send row m of [ranks, X] integers to rank m; return what the ranks sent here, [ranks, X]."""
        ones = [1] * self.group.size
        return self.exchange_rows(counts_MX, ones, ones, what)


def _row_bytes(x: torch.Tensor) -> int:
    elements = 1
    for extent in x.shape[1:]:
        elements *= extent
    return elements * x.element_size()


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, ...] of any dtype as [rows, bytes]: every backend moves bytes, not all move every dtype."""
    return x.contiguous().view(x.shape[0], _row_bytes(x) // x.element_size()).view(torch.uint8)


def _from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return data.view(like.dtype).view(data.shape[0], *like.shape[1:])


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, exchange: Exchange, send: Sequence[int], receive: Sequence[int], what: str
    ) -> torch.Tensor:
        ctx.exchange, ctx.send, ctx.receive, ctx.what = exchange, send, receive, what
        return exchange.exchange_rows(x, send, receive, what)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        returned = ctx.exchange.exchange_rows(gradient, ctx.receive, ctx.send, f"{ctx.what}, gradient")
        return returned, None, None, None, None


def exchanged_rows(
    x: torch.Tensor, exchange: Exchange, send: Sequence[int], receive: Sequence[int], what: str
) -> torch.Tensor:
    """`Exchange.exchange_rows` with autograd: gradients travel back the same way."""
    return _ExchangeRows.apply(x, exchange, send, receive, what)  # type: ignore[return-value]


class _GatherForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, counts: Sequence[int], what: str) -> torch.Tensor:  # type: ignore[override]
        first = sum(counts[: exchange.group.rank])
        ctx.own = slice(first, first + counts[exchange.group.rank])
        return exchange.gather_rows(x, counts, what).view(sum(counts), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return gradient[ctx.own], None, None, None


def gathered_for_all(x: torch.Tensor, exchange: Exchange, counts: Sequence[int], what: str) -> torch.Tensor:
    """Return the rows of all ranks, of which this rank back-propagates into its own only.

    When every rank computes the same scalar from them, the sum over ranks of the gradients is that scalar's gradient,
    each term once.
    """
    return _GatherForAll.apply(x, exchange, counts, what)  # type: ignore[return-value]

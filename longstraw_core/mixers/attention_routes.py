"""The ways of queries to keys when a segment and the pages before it are dealt to ranks.

`Local`: one rank has everything. `QueriesTravel`: every rank attends with all queries to the keys that it owns;
partial outputs return to the queries' owners and are merged there. `KeysTravel`: every rank gathers all keys and
attends with its own queries. All three compute the same gradient; the bytes that they send: `exchange/volume.py`.

The gradient of a merged output cannot be left to the partial operators: it needs the output and the log-sum-exp over
all keys, which only the owner of the query has. So the backward of a route sends them with the queries.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.partials import merged, packed, row_sums
from longstraw_core.mixers.tiled_attention import attend, attend_gradient
from longstraw_core.resident.paged_keys_values import PagedPrefix, PrefixTile


class AttentionRoute(Protocol):
    """Attention of owned queries over all keys that they see, and its gradient. Tensors are those of owned tokens."""

    def forward(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, prefix: PagedPrefix, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output [T, N, D], log-sum-exp [T, N]) over all keys, fp32."""
        ...

    def backward(
        self,
        dout_TND: torch.Tensor,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_TND: torch.Tensor,
        lse_TN: torch.Tensor,
        prefix: PagedPrefix,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) in fp32 and add the gradients of resident rows to their owners' sinks."""
        ...


class Local:
    """Queries and keys are all here."""

    def forward(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, prefix: PagedPrefix, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; see `AttentionRoute.forward`."""
        return attend(q_TND, k_TKD, v_TKD, prefix.tiles(), first_query=0, first_key=0, scale=scale)

    def backward(
        self,
        dout_TND: torch.Tensor,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_TND: torch.Tensor,
        lse_TN: torch.Tensor,
        prefix: PagedPrefix,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Back-propagate; see `AttentionRoute.backward`."""
        delta_TN = row_sums(dout_TND, out_TND)
        return attend_gradient(
            dout_TND,
            q_TND,
            k_TKD,
            v_TKD,
            prefix.tiles(),
            lse_TN,
            delta_TN,
            first_query=0,
            first_key=0,
            scale=scale,
        )


class QueriesTravel:
    """Queries visit the keys of every rank."""

    def __init__(self, exchange: Exchange, segment: SegmentOwnership) -> None:
        self._exchange = exchange
        self._segment = segment

    def forward(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, prefix: PagedPrefix, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; see `AttentionRoute.forward`."""
        counts = self._segment.counts
        everyones_TND = self._exchange.gather_rows(q_TND, counts, "queries")
        first_key = self._segment.owned.start
        partial = attend(everyones_TND, k_TKD, v_TKD, prefix.tiles(), first_query=0, first_key=first_key, scale=scale)
        return merged(self._exchange.to_owners(packed(*partial), counts, "partial outputs"))

    def backward(
        self,
        dout_TND: torch.Tensor,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_TND: torch.Tensor,
        lse_TN: torch.Tensor,
        prefix: PagedPrefix,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Back-propagate; see `AttentionRoute.backward`."""
        counts, exchange = self._segment.counts, self._exchange
        rows_TNX = torch.cat((q_TND, dout_TND.to(q_TND.dtype)), dim=-1)
        everyones_TNX = exchange.gather_rows(rows_TNX, counts, "queries and output gradients")
        everyones_q_TND, everyones_dout_TND = (x.contiguous() for x in everyones_TNX.split(q_TND.shape[-1], dim=-1))
        sums_TN2 = torch.stack((lse_TN, row_sums(dout_TND, out_TND)), dim=-1)
        everyones_lse_TN, delta_TN = exchange.gather_rows(sums_TN2, counts, "row sums").unbind(-1)
        dq_TND, dk_TKD, dv_TKD = attend_gradient(
            everyones_dout_TND,
            everyones_q_TND,
            k_TKD,
            v_TKD,
            prefix.tiles(),
            everyones_lse_TN,
            delta_TN,
            first_query=0,
            first_key=self._segment.owned.start,
            scale=scale,
        )
        return exchange.to_owners(dq_TND, counts, "partial query gradients").sum(0), dk_TKD, dv_TKD


class KeysTravel:
    """Keys and values of every rank visit the queries."""

    def __init__(self, exchange: Exchange, segment: SegmentOwnership) -> None:
        self._exchange = exchange
        self._segment = segment

    def forward(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, prefix: PagedPrefix, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; see `AttentionRoute.forward`."""
        everyones_k_SKD, everyones_v_SKD, resident_P2KD = self._gather(k_TKD, v_TKD, prefix)
        return attend(
            q_TND,
            everyones_k_SKD,
            everyones_v_SKD,
            _tiles(resident_P2KD, None, prefix.page_tokens),
            first_query=self._segment.owned.start,
            first_key=0,
            scale=scale,
        )

    def backward(
        self,
        dout_TND: torch.Tensor,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_TND: torch.Tensor,
        lse_TN: torch.Tensor,
        prefix: PagedPrefix,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Back-propagate; see `AttentionRoute.backward`."""
        everyones_k_SKD, everyones_v_SKD, resident_P2KD = self._gather(k_TKD, v_TKD, prefix)
        sink_P2KD = None
        if prefix.sinks is not None:
            sink_P2KD = torch.zeros(resident_P2KD.shape, dtype=torch.float32, device=q_TND.device)
        dq_TND, dk_SKD, dv_SKD = attend_gradient(
            dout_TND,
            q_TND,
            everyones_k_SKD,
            everyones_v_SKD,
            _tiles(resident_P2KD, sink_P2KD, prefix.page_tokens),
            lse_TN,
            row_sums(dout_TND, out_TND),
            first_query=self._segment.owned.start,
            first_key=0,
            scale=scale,
        )
        if sink_P2KD is not None:
            summed_P2KD = self._summed(sink_P2KD, self._segment.resident_counts, "resident gradients")
            own_tiles, done = list(prefix.tiles()), 0
            for tile in own_tiles:
                part_T2KD = summed_P2KD[done : done + tile.k_KTD.shape[1]]
                done += tile.k_KTD.shape[1]
                if tile.k_sink_KTD is not None and tile.v_sink_KTD is not None:
                    tile.k_sink_KTD.add_(part_T2KD[:, 0].transpose(0, 1))
                    tile.v_sink_KTD.add_(part_T2KD[:, 1].transpose(0, 1))
        dkv_S2KD = torch.stack((dk_SKD, dv_SKD), dim=1)
        dk_TKD, dv_TKD = self._summed(dkv_S2KD, self._segment.counts, "key and value gradients").unbind(1)
        return dq_TND, dk_TKD, dv_TKD

    def _gather(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, prefix: PagedPrefix
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of the segment in token order, resident rows [start, 2, K, D] in rank order."""
        own_T2KD = torch.stack((k_TKD, v_TKD), dim=1)
        everyones_S2KD = self._exchange.gather_rows(own_T2KD, self._segment.counts, "keys and values")
        resident_T2KD = _rows(prefix, like=own_T2KD)
        everyones_P2KD = self._exchange.gather_rows(
            resident_T2KD, self._segment.resident_counts, "resident keys and values"
        )
        return everyones_S2KD[:, 0], everyones_S2KD[:, 1], everyones_P2KD

    def _summed(self, gradient: torch.Tensor, counts: Sequence[int], what: str) -> torch.Tensor:
        """Sum at their owner what all ranks found for its rows."""
        return self._exchange.to_owners(gradient, counts, what).sum(0)


def _rows(prefix: PagedPrefix, *, like: torch.Tensor) -> torch.Tensor:
    """Copy the resident keys and values of this rank into rows [T, 2, K, D]."""
    parts = [torch.stack((tile.k_KTD, tile.v_KTD)).permute(2, 0, 1, 3) for tile in prefix.tiles()]
    return torch.cat([like.new_empty((0, *like.shape[1:])), *parts])


def _tiles(rows_P2KD: torch.Tensor, sink_P2KD: torch.Tensor | None, page_tokens: int) -> Iterator[PrefixTile]:
    """Present rows as tiles of a page's size; every query sees all of them, so their order does not matter."""
    for begin in range(0, rows_P2KD.shape[0], page_tokens):
        page = slice(begin, begin + page_tokens)
        k_KTD, v_KTD = (rows_P2KD[page, which].transpose(0, 1) for which in (0, 1))
        if sink_P2KD is None:
            yield PrefixTile(k_KTD, v_KTD, None, None)
        else:
            k_sink_KTD, v_sink_KTD = (sink_P2KD[page, which].transpose(0, 1) for which in (0, 1))
            yield PrefixTile(k_KTD, v_KTD, k_sink_KTD, v_sink_KTD)

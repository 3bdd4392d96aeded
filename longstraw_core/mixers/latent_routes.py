"""The ways of absorbed queries to selected rows when a segment and the rows before it are dealt to ranks.

As in `attention_routes.py`: `LocalRows` when one rank has everything; `QueriesVisitRows` when every rank attends with
all queries to those of the selected rows that it owns, and partial outputs are merged by the queries' owners;
`RowsVisitQueries` when every rank gathers all rows and attends with its own queries. Tensors are those of owned tokens.
"""

from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.partials import merged, packed, row_sums
from longstraw_core.mixers.selected_attention import (
    SelectedGradient,
    SelectedRows,
    attend_selected,
    attend_selected_gradient,
)
from longstraw_core.mixers.selection import Selection
from longstraw_core.resident.latent_state import LatentState


class LatentQueries(NamedTuple):
    """What a segment's attention in one layer is computed from."""

    q_TND: torch.Tensor
    q_prefix_TND: torch.Tensor | None
    own_TD: torch.Tensor
    selection: Selection
    state: LatentState
    latent: int
    scale: float
    state_gradient: bool


class Attended(NamedTuple):
    """Weighted latents as `attend_selected` returns them, merged over all ranks."""

    out_TNL: torch.Tensor
    out_prefix_TNL: torch.Tensor | None
    lse_TN: torch.Tensor
    """Log-sum-exp over all ranks; empty when backward does not need it."""


class LatentRoute(Protocol):
    """Attention of owned queries to the rows they selected, and its gradient."""

    def forward(self, queries: LatentQueries) -> Attended:
        """Attend."""
        ...

    def backward(
        self, queries: LatentQueries, attended: Attended, dout_TNL: torch.Tensor, dout_prefix_TNL: torch.Tensor | None
    ) -> SelectedGradient:
        """Back-propagate; the gradients of resident rows are added to their owners' sinks."""
        ...


class LocalRows:
    """Queries and rows are all here."""

    def __init__(self, segment: SegmentOwnership) -> None:
        self._start = segment.start

    def _inputs(self, queries: LatentQueries, *, backward: bool) -> SelectedRows:
        return SelectedRows(
            queries.q_TND,
            queries.q_prefix_TND,
            queries.own_TD,
            queries.selection.positions_TK,
            queries.state.latents(self._start, backward=backward),
            first_query=0,
            partial=False,
            latent=queries.latent,
            scale=queries.scale,
        )

    def forward(self, queries: LatentQueries) -> Attended:
        """Attend."""
        return Attended(*attend_selected(self._inputs(queries, backward=False)))

    def backward(
        self, queries: LatentQueries, attended: Attended, dout_TNL: torch.Tensor, dout_prefix_TNL: torch.Tensor | None
    ) -> SelectedGradient:
        """Back-propagate."""
        del attended
        inputs = self._inputs(queries, backward=True)
        with_sink = queries.state_gradient and self._start > 0
        with queries.state.gradient_sink(self._start) if with_sink else nullcontext() as sink_PD:
            return attend_selected_gradient(inputs, dout_TNL, dout_prefix_TNL, sink_PD)


class QueriesVisitRows:
    """Queries visit the rows of every rank."""

    def __init__(self, exchange: Exchange, segment: SegmentOwnership) -> None:
        self._exchange = exchange
        self._segment = segment

    def _inputs(
        self, queries: LatentQueries, q_TND: torch.Tensor, q_prefix_TND: torch.Tensor | None, *, backward: bool
    ) -> SelectedRows:
        return SelectedRows(
            q_TND,
            q_prefix_TND,
            queries.own_TD,
            queries.selection.rows_of_all_queries(self._exchange, self._segment),
            queries.state.latents(self._segment.resident, backward=backward),
            first_query=0,
            partial=True,
            latent=queries.latent,
            scale=queries.scale,
        )

    def forward(self, queries: LatentQueries) -> Attended:
        """Attend."""
        counts, exchange = self._segment.counts, self._exchange
        q_TND = exchange.gather_rows(queries.q_TND, counts, "queries")
        q_prefix_TND = None
        if queries.q_prefix_TND is not None:
            q_prefix_TND = exchange.gather_rows(queries.q_prefix_TND, counts, "queries")
        out_TNL, out_prefix_TNL, lse_TN = attend_selected(self._inputs(queries, q_TND, q_prefix_TND, backward=False))
        both_TNX = out_TNL if out_prefix_TNL is None else torch.cat((out_TNL, out_prefix_TNL), dim=-1)
        both_TNX, lse_TN = merged(exchange.to_owners(packed(both_TNX, lse_TN), counts, "partial outputs"))
        if q_prefix_TND is None:
            return Attended(both_TNX, None, lse_TN)
        out_TNL, out_prefix_TNL = (x.contiguous() for x in both_TNX.split(queries.latent, dim=-1))
        return Attended(out_TNL, out_prefix_TNL, lse_TN)

    def backward(
        self, queries: LatentQueries, attended: Attended, dout_TNL: torch.Tensor, dout_prefix_TNL: torch.Tensor | None
    ) -> SelectedGradient:
        """Back-propagate."""
        counts, exchange = self._segment.counts, self._exchange
        q_TND, q_prefix_TND = queries.q_TND, queries.q_prefix_TND
        delta_TN = row_sums(dout_TNL, attended.out_TNL)
        parts = [q_TND, dout_TNL.to(q_TND.dtype)]
        if q_prefix_TND is not None and dout_prefix_TNL is not None and attended.out_prefix_TNL is not None:
            delta_TN = delta_TN + row_sums(dout_prefix_TNL, attended.out_prefix_TNL)
            parts += [q_prefix_TND, dout_prefix_TNL.to(q_TND.dtype)]
        everyones_TNX = exchange.gather_rows(torch.cat(parts, dim=-1), counts, "queries and output gradients")
        everyones = [x.contiguous() for x in everyones_TNX.split([part.shape[-1] for part in parts], dim=-1)]
        sums_TN2 = torch.stack((attended.lse_TN, delta_TN), dim=-1)
        lse_TN, delta_TN = exchange.gather_rows(sums_TN2, counts, "row sums").unbind(-1)
        inputs = self._inputs(queries, everyones[0], everyones[2] if len(everyones) > 2 else None, backward=True)
        resident = self._segment.resident
        with_sink = queries.state_gradient and resident > 0
        with queries.state.gradient_sink(resident) if with_sink else nullcontext() as sink_PD:
            found = attend_selected_gradient(
                inputs,
                everyones[1].float(),
                everyones[3].float() if len(everyones) > 2 else None,
                sink_PD,
                lse_TN=lse_TN,
                delta_TN=delta_TN,
            )
        dq_TND = exchange.to_owners(found.dq_TND, counts, "partial query gradients").sum(0)
        dq_prefix_TND = found.dq_prefix_TND
        if dq_prefix_TND is not None:
            dq_prefix_TND = exchange.to_owners(dq_prefix_TND, counts, "partial query gradients").sum(0)
        return SelectedGradient(dq_TND, dq_prefix_TND, found.down_SD)


class RowsVisitQueries:
    """Rows of every rank visit the queries."""

    def __init__(self, exchange: Exchange, segment: SegmentOwnership) -> None:
        self._exchange = exchange
        self._segment = segment

    def _inputs(self, queries: LatentQueries, *, backward: bool) -> SelectedRows:
        segment, exchange = self._segment, self._exchange
        own_SD = exchange.gather_rows(queries.own_TD, segment.counts, "rows")
        resident_TD = queries.state.latents(segment.resident, backward=backward)
        prefix_PD = exchange.gather_rows(resident_TD, segment.resident_counts, "resident rows")
        return SelectedRows(
            queries.q_TND,
            queries.q_prefix_TND,
            own_SD,
            queries.selection.positions_TK,
            segment.in_position_order(prefix_PD),
            first_query=segment.owned.start,
            partial=False,
            latent=queries.latent,
            scale=queries.scale,
        )

    def forward(self, queries: LatentQueries) -> Attended:
        """Attend."""
        return Attended(*attend_selected(self._inputs(queries, backward=False)))

    def backward(
        self, queries: LatentQueries, attended: Attended, dout_TNL: torch.Tensor, dout_prefix_TNL: torch.Tensor | None
    ) -> SelectedGradient:
        """Back-propagate."""
        del attended
        segment, exchange = self._segment, self._exchange
        inputs = self._inputs(queries, backward=True)
        sink_PD = None
        if queries.state_gradient:
            sink_PD = torch.zeros(inputs.prefix_PD.shape, dtype=torch.float32, device=inputs.q_TND.device)
        found = attend_selected_gradient(inputs, dout_TNL, dout_prefix_TNL, sink_PD)
        if sink_PD is not None:
            in_rank_order_PD = segment.in_rank_order(sink_PD)
            partials = exchange.to_owners(in_rank_order_PD, segment.resident_counts, "resident gradients")
            if segment.resident:
                with queries.state.gradient_sink(segment.resident) as own_sink_TD:
                    own_sink_TD.add_(partials.sum(0))
        down_TD = exchange.to_owners(found.down_SD, segment.counts, "row gradients").sum(0)
        return SelectedGradient(found.dq_TND, found.dq_prefix_TND, down_TD)

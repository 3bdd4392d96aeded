"""GLM's multi-head latent attention with its index selection, on the projections of the Hugging Face module.

Formulas: transformers 5.24 modeling_glm_moe_dsa.py, `GlmMoeDsaAttention` and `GlmMoeDsaIndexer`. `kv_b_proj` is
absorbed: its key half maps every query into the latent space, its value half maps the weighted latents back, so that
keys and values are never expanded. It acts on resident latents with autograd, as it does over transformers' cache.
The indexer chooses without autograd; a layer without one reuses the choice of the last layer that has one.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw_core.mixers.absorbed_attention import absorbed_attention
from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.volume import AttentionSizes, attention_travels, swept_attention_travels
from longstraw_core.mixers.family import Mixed, StateBytes
from longstraw_core.mixers.index_exchange import select_across_ranks
from longstraw_core.mixers.index_selection import (
    Cut,
    IndexInputs,
    first_selecting_row,
    select_tokens,
    select_tokens_again,
    selection_table,
)
from longstraw_core.mixers.latent_routes import LatentRoute, LocalRows, QueriesVisitRows, RowsVisitQueries
from longstraw_core.mixers.low_rank import LowRank, linear_weight
from longstraw_core.mixers.rotary import rotate_interleaved
from longstraw_core.mixers.segment import Segment
from longstraw_core.mixers.selection import Selection
from longstraw_core.resident.latent_state import LatentLayout, LatentState
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.spec.errors import NumericError


@dataclass
class SelectionCarry:
    """The selections that index layers made in this pass, by layer.

    With autograd all of them are kept, because a layer that is recomputed in its backward must find the selection it
    used; without autograd only the latest is.
    """

    by_layer: dict[int, Selection] = field(default_factory=dict)

    def put(self, layer: int, selection: Selection) -> None:
        """Leave the selection of an index layer for the layers that share it."""
        if not torch.is_grad_enabled():
            self.by_layer.clear()
        self.by_layer[layer] = selection


@dataclass(frozen=True)
class LatentSegment(Segment):
    """A segment on its way through the layers of one pass, with what one layer leaves for the next."""

    carry: SelectionCarry = field(default_factory=SelectionCarry)


class LatentAttention:
    """Token mixer of one layer; its modules may be wrapped by PEFT.

    Args:
        module: the Hugging Face attention module.
        top_k: tokens that an index layer selects for every query.
        layout: layout of the layer's resident state.
        selects_in: the index layer whose selection this layer uses; its own number when it has an indexer.
        exchange: the ranks that share the tokens.
    """

    def __init__(self, module: Any, *, top_k: int, layout: LatentLayout, selects_in: int, exchange: Exchange) -> None:
        self._module = module
        self._exchange = exchange
        width = layout.latents.width
        self.sizes = AttentionSizes(module.num_heads, width, module.kv_lora_rank, width, layout.latents.dtype.itemsize)
        self._top_k = top_k
        self._selects_in = selects_in
        self.layout = layout

    def state_bytes(self, ownership: PromptOwnership, *, swept: bool) -> StateBytes:
        """Bytes of the owned pages, of the recorded choices when the prompt is swept, and of the gradient sinks."""
        rows = ownership.rows()
        pages = self.layout.latents.bytes_for(rows)
        if self.layout.index_keys is not None:
            pages += self.layout.index_keys.bytes_for(rows)
        choices = self.layout.choices.bytes_for(ownership) if swept else 0
        return StateBytes(pages, 0, 0, self.layout.latents.sink_bytes_for(rows), choices)

    def mix(self, x_TH: torch.Tensor, segment: LatentSegment, state: LatentState, *, state_only: bool) -> Mixed:
        """Mix normalised hidden states [T, H]; produces rows (latent, rope key) [T, D], and index keys [T, I]."""
        module, tokens = self._module, segment.length
        latent_dim, nope_dim, rope_dim = module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim
        latent_TL, k_rope_TR = module.kv_a_proj_with_mqa(x_TH).split((latent_dim, rope_dim), dim=-1)
        k_rope_TR = rotate_interleaved(k_rope_TR[:, None], segment.cos_TD, segment.sin_TD)[:, 0]
        own_TD = torch.cat((module.kv_a_layernorm(latent_TL), k_rope_TR), dim=-1)
        own_keys_TI = None if module.indexer is None else self._index_keys(x_TH, segment)
        produced = (own_TD,) if own_keys_TI is None else (own_TD, own_keys_TI)
        if state_only:
            return Mixed(None, produced)

        q_latent_TQ = module.q_a_layernorm(module.q_a_proj(x_TH))
        q_TNE = module.q_b_proj(q_latent_TQ).view(tokens, module.num_heads, nope_dim + rope_dim)
        q_nope_TNE, q_rope_TNR = q_TNE.split((nope_dim, rope_dim), dim=-1)
        q_rope_TNR = rotate_interleaved(q_rope_TNR, segment.cos_TD, segment.sin_TD)
        selections = segment.carry.by_layer
        if own_keys_TI is not None and self._selects_in not in selections:  # a recomputed layer has selected already
            segment.carry.put(self._selects_in, self._select(x_TH, q_latent_TQ, own_keys_TI, segment, state))
        selection = selections[self._selects_in]

        weight, updates = linear_weight(module.kv_b_proj)
        apart = bool(updates) and not segment.prefix_adapted and segment.start > 0
        q_base_NTL = self._into_latent(q_nope_TNE, weight)
        q_NTL = self._add_updates_into_latent(q_base_NTL, q_nope_TNE, updates)
        out_TNL, out_prefix_TNL = absorbed_attention(
            torch.cat((q_NTL.transpose(0, 1), q_rope_TNR), dim=-1),
            torch.cat((q_base_NTL.transpose(0, 1), q_rope_TNR), dim=-1) if apart else None,
            own_TD,
            selection,
            state,
            latent=latent_dim,
            scale=module.scaling,
            state_gradient=segment.state_gradient,
            route=self._route(segment),
        )
        out_TNV = self._out_of_latent(out_TNL.to(x_TH.dtype), weight, updates)
        if out_prefix_TNL is not None:
            out_TNV = out_TNV + self._out_of_latent(out_prefix_TNL.to(x_TH.dtype), weight, [])
        return Mixed(module.o_proj(out_TNV.reshape(tokens, module.num_heads * module.v_head_dim)), produced)

    def _route(self, segment: Segment) -> LatentRoute:
        if self._exchange.alone:
            return LocalRows(segment.ownership)
        if segment.choices == "free":
            travels = attention_travels(
                self.sizes, segment.ownership, state_gradient=segment.state_gradient, backward=torch.is_grad_enabled()
            )
        else:  # what later layers select by score is selected again in the sweep
            travels = swept_attention_travels(self.sizes, segment.ownership)
        route = QueriesVisitRows if travels == "queries" else RowsVisitQueries
        return route(self._exchange, segment.ownership)

    # kv_b_proj, absorbed: rows of its weight are, per head, the key half and then the value half

    def _halves(self, rows_OX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._module
        per_head = rows_OX.view(module.num_heads, module.qk_nope_head_dim + module.v_head_dim, rows_OX.shape[-1])
        return per_head.split((module.qk_nope_head_dim, module.v_head_dim), dim=1)  # type: ignore[return-value]

    def _into_latent(self, q_TNE: torch.Tensor, weight_OL: torch.Tensor) -> torch.Tensor:
        """Queries [N, T, L] under the frozen key half."""
        return torch.matmul(q_TNE.transpose(0, 1), self._halves(weight_OL)[0])

    def _add_updates_into_latent(
        self, q_base_NTL: torch.Tensor, q_TNE: torch.Tensor, updates: list[LowRank]
    ) -> torch.Tensor:
        for a_RL, b_OR, scale in updates:
            narrow_NTR = torch.matmul(q_TNE.transpose(0, 1).to(b_OR.dtype), self._halves(b_OR)[0])
            q_base_NTL = q_base_NTL + (torch.matmul(narrow_NTR, a_RL) * scale).to(q_base_NTL.dtype)
        return q_base_NTL

    def _out_of_latent(self, out_TNL: torch.Tensor, weight_OL: torch.Tensor, updates: list[LowRank]) -> torch.Tensor:
        """Values [T, N, V] of weighted latents under the value half and its updates."""
        out_NTL = out_TNL.transpose(0, 1)
        values_NTV = torch.matmul(out_NTL, self._halves(weight_OL)[1].transpose(1, 2))
        for a_RL, b_OR, scale in updates:
            narrow_NTR = torch.matmul(out_NTL.to(a_RL.dtype), a_RL.t())
            wide_NTV = torch.matmul(narrow_NTR, self._halves(b_OR)[1].transpose(1, 2))
            values_NTV = values_NTV + (wide_NTV * scale).to(values_NTV.dtype)
        return values_NTV.transpose(0, 1)

    # The indexer

    @torch.no_grad()
    def _index_keys(self, x_TH: torch.Tensor, segment: Segment) -> torch.Tensor:
        indexer = self._module.indexer
        k_TI = indexer.k_norm(indexer.wk(x_TH))
        return self._rotate_head(k_TI[:, None], segment)[:, 0]

    def _rotate_head(self, x_TNI: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Rotate the first channels of every index head."""
        rope_dim = self._module.qk_rope_head_dim
        rotated = rotate_interleaved(x_TNI[..., :rope_dim], segment.cos_TD, segment.sin_TD)
        return torch.cat((rotated, x_TNI[..., rope_dim:]), dim=-1)

    @torch.no_grad()
    def _select(
        self,
        x_TH: torch.Tensor,
        q_latent_TQ: torch.Tensor,
        own_keys_TI: torch.Tensor,
        segment: Segment,
        state: LatentState,
    ) -> Selection:
        first, length = segment.ownership.first, segment.length  # owned tokens, behind all tokens before them
        rows = (segment.resident, segment.resident + length)
        if segment.choices == "reuse" and state.records("selection"):
            return self._selection(segment, state.recorded_choice("selection", *rows))
        inputs = self._index_inputs(x_TH, q_latent_TQ, own_keys_TI, segment, state)
        recorded = None
        if segment.choices == "reuse":
            recorded = Cut(
                state.recorded_choice("cut_scores", *rows)[:, 0],
                state.recorded_choice("cut_positions", *rows)[:, 0],
            )
        if recorded is not None and self._exchange.alone:
            selected_SK = select_tokens_again(inputs, recorded, top_k=self._top_k, name=state.name)
            return self._selection(segment, selected_SK)
        if self._exchange.alone:
            selected_SK, cut = select_tokens(inputs, top_k=self._top_k)
            rows_XW = None
        else:
            selected_SK, cut, rows_XW = select_across_ranks(
                inputs, segment.ownership, self._exchange, top_k=self._top_k
            )
        if recorded is not None:
            self._check_cut(cut, recorded, first + first_selecting_row(first, length, self._top_k), state)
        if segment.choices == "record":
            first_row = segment.resident + first_selecting_row(first, length, self._top_k)
            state.record_choice("selection", first_row, selected_SK)
            state.record_choice("cut_scores", first_row, cut.scores_S[:, None])
            state.record_choice("cut_positions", first_row, cut.positions_S[:, None])
        return self._selection(segment, selected_SK, rows_XW)

    def _selection(self, segment: Segment, selected_SK: torch.Tensor, rows_XW: torch.Tensor | None = None) -> Selection:
        table_TK = selection_table(segment.ownership.first, segment.length, self._top_k, selected_SK)
        return Selection(table_TK, self._top_k, rows_XW)

    @staticmethod
    def _check_cut(cut: Cut, recorded: Cut, first: int, state: LatentState) -> None:
        """Check that a selection made again ends where it ended at capture."""
        differs_S = (cut.scores_S != recorded.scores_S) | (cut.positions_S != recorded.positions_S)
        wrong = differs_S.nonzero()[:, 0]
        if wrong.numel():
            raise NumericError(
                f"{state.name}: token {first + int(wrong[0])} selects other tokens than at capture: scores are "
                "computed otherwise here than there. Sweep on the kind of device, with the threads and the ranks of "
                "the capture, or choose layout.selection_record: positions"
            )

    def _index_inputs(
        self,
        x_TH: torch.Tensor,
        q_latent_TQ: torch.Tensor,
        own_keys_TI: torch.Tensor,
        segment: Segment,
        state: LatentState,
    ) -> IndexInputs:
        indexer = self._module.indexer
        q_TNI = indexer.wq_b(q_latent_TQ).view(segment.length, indexer.n_heads, indexer.head_dim)
        weights = indexer.weights_proj
        return IndexInputs(
            q_TNI=self._rotate_head(q_TNI, segment),
            w_TN=weights(x_TH.to(weights.weight.dtype)).float() * indexer.n_heads**-0.5,
            prefix_keys_PI=state.index_keys(segment.resident),
            own_keys_TI=own_keys_TI,
            scale=indexer.softmax_scale,
        )

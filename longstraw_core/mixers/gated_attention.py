"""Qwen3.5's gated full attention over resident pages, on the projections of the Hugging Face module.

Formulas: transformers 5.24 modeling_qwen3_5.py, `Qwen3_5Attention`. `q_proj` yields query and gate of every head;
queries and keys are normalised per head before the partial rotation; the output is multiplied by sigmoid(gate).
"""

from typing import Any

import torch

from longstraw_core.mixers.attention_routes import AttentionRoute, KeysTravel, Local, QueriesTravel
from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.volume import AttentionSizes, attention_travels
from longstraw_core.mixers.family import Mixed, StateBytes
from longstraw_core.mixers.paged_attention import paged_attention
from longstraw_core.mixers.rotary import rotate
from longstraw_core.mixers.segment import Segment
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.paged_keys_values import PagedKeysValues, PageLayout
from longstraw_core.resident.pool import ResidentPool


class GatedAttention:
    """Token mixer of one `full_attention` layer; its modules may be wrapped by PEFT."""

    def __init__(
        self, module: Any, *, heads: int, key_heads: int, page_tokens: int, dtype: torch.dtype, exchange: Exchange
    ) -> None:
        self._module = module
        self._exchange = exchange
        self._heads = heads
        self._key_heads = key_heads
        self._head_dim: int = module.head_dim
        self._layout = PageLayout(page_tokens, key_heads, module.head_dim, dtype)
        self.sizes = AttentionSizes(
            heads=heads,
            query_width=module.head_dim,
            value_width=module.head_dim,
            row_values=2 * key_heads * module.head_dim,
            element_bytes=dtype.itemsize,
        )

    def new_state(self, pool: ResidentPool, owner: str) -> PagedKeysValues:
        """Return empty pages for this layer."""
        return PagedKeysValues(pool, owner, self._layout)

    def state_bytes(self, ownership: PromptOwnership, boundaries: int) -> StateBytes:
        """Bytes of the owned pages and of their gradient sinks; boundaries need no copies."""
        del boundaries
        rows = ownership.rows()
        return StateBytes(self._layout.bytes_for(rows), 0, 0, self._layout.sink_bytes_for(rows))

    def mix(self, x_TH: torch.Tensor, segment: Segment, state: PagedKeysValues, *, state_only: bool) -> Mixed:
        """Mix normalised hidden states [T, H]; produces (keys, values), each [T, K, D], as they go into pages."""
        module, tokens = self._module, segment.length
        k_TKD = module.k_norm(module.k_proj(x_TH).view(tokens, self._key_heads, self._head_dim))
        k_TKD = rotate(k_TKD, segment.cos_TD, segment.sin_TD)
        v_TKD = module.v_proj(x_TH).view(tokens, self._key_heads, self._head_dim)
        if state_only:
            return Mixed(None, (k_TKD, v_TKD))
        query_and_gate = module.q_proj(x_TH).view(tokens, self._heads, 2 * self._head_dim)
        q_TND, gate_TND = query_and_gate.chunk(2, dim=-1)
        q_TND = rotate(module.q_norm(q_TND), segment.cos_TD, segment.sin_TD)
        prefix = state.prefix(segment.resident, with_gradient=segment.state_gradient)
        out_TND = paged_attention(q_TND, k_TKD, v_TKD, prefix, scale=self._head_dim**-0.5, route=self._route(segment))
        gated_TE = (out_TND * torch.sigmoid(gate_TND)).reshape(tokens, self._heads * self._head_dim)
        return Mixed(module.o_proj(gated_TE), (k_TKD, v_TKD))

    def _route(self, segment: Segment) -> AttentionRoute:
        if self._exchange.alone:
            return Local()
        travels = attention_travels(
            self.sizes, segment.ownership, state_gradient=segment.state_gradient, backward=torch.is_grad_enabled()
        )
        route = QueriesTravel if travels == "queries" else KeysTravel
        return route(self._exchange, segment.ownership)

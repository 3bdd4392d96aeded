"""The `glm_moe_dsa` family (GLM-5 … GLM-5.2): binds a Hugging Face model's modules to layers the engine can run."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.exchange.traffic import TrafficMeter
from longstraw_core.mixers.family import Layer, Mixed, StateBytes
from longstraw_core.mixers.latent_attention import LatentAttention, LatentSegment
from longstraw_core.mixers.rotary import rotary_angles, rotary_frequencies
from longstraw_core.mixers.routed_experts import RoutedExperts
from longstraw_core.mixers.segment import Choices, Segment
from longstraw_core.resident.latent_state import ChoiceLayout, LatentLayout, LatentState
from longstraw_core.resident.layer_state import LayerState
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.page_run import RowLayout
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.resident.staging import Stager
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.transaction import SelectionRecord


class GlmLayer:
    """One decoder layer: x += attention(norm(x)); x += experts or mlp(norm(x))."""

    def __init__(self, module: Any, mixer: LatentAttention, experts: Exchange) -> None:
        self._module = module
        self._mixer = mixer
        self._experts = RoutedExperts(module.mlp, experts) if hasattr(module.mlp, "experts") else None

    @property
    def layout(self) -> LatentLayout:
        """Layout of the layer's resident state."""
        return self._mixer.layout

    def mix(self, x_TH: torch.Tensor, segment: Segment, state: LayerState, *, state_only: bool) -> Mixed:
        """Normalise and mix with the resident tokens."""
        normed_TH = self._module.input_layernorm(x_TH)
        return self._mixer.mix(normed_TH, segment, state, state_only=state_only)  # type: ignore[arg-type]

    def feed_forward(self, x_TH: torch.Tensor, segment: Segment, state: LayerState) -> torch.Tensor:
        """Normalise and apply the experts, or the dense network of a leading layer."""
        normed_TH = self._module.post_attention_layernorm(x_TH)
        if self._experts is None:
            return self._module.mlp(normed_TH)
        return self._experts.feed_forward(normed_TH, segment, state)  # type: ignore[arg-type]

    def state_bytes(self, ownership: PromptOwnership, boundaries: int, *, swept: bool) -> StateBytes:
        """Return the mixer's state bytes."""
        del boundaries
        return self._mixer.state_bytes(ownership, swept=swept)


class GlmFamily:
    """A `GlmMoeDsaForCausalLM` whose projections and experts PEFT may have wrapped."""

    def __init__(
        self,
        model: Any,
        *,
        page_tokens: int,
        selection_record: SelectionRecord = "cut",
        context: RankGroup = ALONE,
        experts: RankGroup = ALONE,
    ) -> None:
        text = model.model
        config = text.config
        self._check(config)
        self.vocabulary: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.embedding: nn.Module = text.embed_tokens
        self.final_norm: nn.Module = text.norm
        self.head: nn.Linear = model.lm_head
        self.dtype: torch.dtype = text.embed_tokens.weight.dtype
        self.device: torch.device = text.embed_tokens.weight.device
        self.state_device = torch.device("cpu") if self.device.type == "cuda" else self.device
        rope, rope_dim = config.rope_parameters, config.qk_rope_head_dim
        self._inverse, self._amplitude = rotary_frequencies(rope, rope_dim, self.device)
        self._stager = Stager(self.device)
        self._selection_record: SelectionRecord = selection_record
        modules = text.layers[: config.num_hidden_layers]
        index_layers = [index for index, kind in enumerate(config.indexer_types) if kind == "full"]
        self.traffic = TrafficMeter()
        self._glm_layers = [
            GlmLayer(
                module,
                LatentAttention(
                    module.self_attn,
                    top_k=config.index_topk,
                    layout=self._layout(module, config, page_tokens, last=index == len(modules) - 1),
                    selects_in=max(layer for layer in index_layers if layer <= index),
                    exchange=Exchange(context, self.traffic, index),
                ),
                Exchange(experts, self.traffic, index),
            )
            for index, module in enumerate(modules)
        ]
        self.layers: Sequence[Layer] = self._glm_layers

    def segment(
        self,
        ownership: SegmentOwnership,
        *,
        state_gradient: bool,
        choices: Choices = "free",
        prefix_adapted: bool = True,
    ) -> Segment:
        """Return the segment with the rotary angles of its owned tokens, for one pass."""
        cos_TD, sin_TD = rotary_angles(ownership.first, ownership.length, self._inverse, self._amplitude)
        return LatentSegment(ownership, state_gradient, cos_TD, sin_TD, choices, prefix_adapted)

    def new_states(self, pool: ResidentPool, owners: Sequence[str], ownership: PromptOwnership) -> list[LayerState]:
        """Return empty states of all layers for a prompt that is dealt like this, each knowing its neighbours."""
        states = [
            LatentState(pool, owner, layer.layout, ownership, self._stager)
            for layer, owner in zip(self._glm_layers, owners, strict=True)
        ]
        for before, after in itertools.pairwise(states):
            before.following, after.preceding = after, before
        return list(states)

    def _layout(self, module: Any, config: Any, page_tokens: int, *, last: bool) -> LatentLayout:
        attention = module.self_attn
        indexer = attention.indexer
        routed = hasattr(module.mlp, "experts") and not last  # nobody reads the last layer's output at capture
        return LatentLayout(
            latents=RowLayout(page_tokens, attention.kv_lora_rank + attention.qk_rope_head_dim, self.dtype),
            index_keys=None if indexer is None else RowLayout(page_tokens, indexer.head_dim, self.dtype),
            choices=ChoiceLayout(
                selected=0 if indexer is None or last else config.index_topk,
                experts=config.num_experts_per_tok if routed else 0,
                expert_count=config.n_routed_experts,
                selection_record=self._selection_record,
            ),
        )

    @staticmethod
    def _check(config: Any) -> None:
        if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise SpecError("rope parameter 'partial_rotary_factor' is not supported in this family")
        if config.hidden_act != "silu":
            raise SpecError(f"activation {config.hidden_act!r} is not supported; use a model with 'silu'")
        for name, known in (
            ("layer_types", ("indexed_attention",)),
            ("indexer_types", ("full", "shared")),
            ("mlp_layer_types", ("dense", "sparse")),
        ):
            kinds = getattr(config, name)
            unknown = sorted(set(kinds) - set(known))
            if unknown:
                raise SpecError(f"{name} {unknown[0]!r} is not supported; supported are {', '.join(known)}")
            if len(kinds) != config.num_hidden_layers:
                raise SpecError(f"{name} names {len(kinds)} layers, the model has {config.num_hidden_layers}")
        if config.indexer_types[0] != "full":
            raise SpecError("indexer_types: the first layer must be 'full', there is no selection it could share")
        for name, most in (
            ("index_topk", math.inf),
            ("num_experts_per_tok", config.n_routed_experts),
            ("topk_group", config.n_group),
        ):
            if not 1 <= getattr(config, name) <= most:
                raise SpecError(f"{name} is {getattr(config, name)}: it must be from 1 to {most:g}")
        if config.n_group < 1 or config.n_routed_experts % config.n_group != 0:
            raise SpecError(f"n_group is {config.n_group}: it must divide the {config.n_routed_experts} routed experts")

"""The `qwen3_5_text` family (Qwen3.5 / Qwen3.6): binds a Hugging Face model's modules to layers the engine can run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.exchange.traffic import TrafficMeter
from longstraw_core.mixers.family import Layer, Mixed, StateBytes
from longstraw_core.mixers.gated_attention import GatedAttention
from longstraw_core.mixers.gated_delta_net import GatedDeltaNet
from longstraw_core.mixers.rotary import rotary_angles, rotary_frequencies
from longstraw_core.mixers.segment import Choices, Segment
from longstraw_core.resident.layer_state import LayerState
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.spec.errors import SpecError

LAYER_KINDS = ("linear_attention", "full_attention")


class Qwen35Layer:
    """One decoder layer: x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, module: Any, mixer: GatedAttention | GatedDeltaNet) -> None:
        self._module = module
        self._mixer = mixer

    def mix(self, x_TH: torch.Tensor, segment: Segment, state: LayerState, *, state_only: bool) -> Mixed:
        """Normalise and mix with the resident tokens."""
        normed_TH = self._module.input_layernorm(x_TH)
        return self._mixer.mix(normed_TH, segment, state, state_only=state_only)  # type: ignore[arg-type]

    def feed_forward(self, x_TH: torch.Tensor, segment: Segment, state: LayerState) -> torch.Tensor:
        """Normalise and apply the SwiGLU network."""
        del segment, state
        return self._module.mlp(self._module.post_attention_layernorm(x_TH))

    def new_state(self, pool: ResidentPool, owner: str) -> LayerState:
        """Return an empty state of the mixer's kind."""
        return self._mixer.new_state(pool, owner)

    def state_bytes(self, ownership: PromptOwnership, boundaries: int, *, swept: bool) -> StateBytes:
        """Return the mixer's state bytes."""
        del swept
        return self._mixer.state_bytes(ownership, boundaries)


class Qwen35Family:
    """A `Qwen3_5ForCausalLM`, or the text part of the multimodal wrapper, whose projections PEFT may have wrapped."""

    def __init__(self, model: Any, *, page_tokens: int, context: RankGroup = ALONE) -> None:
        text = model.model.language_model if hasattr(model.model, "language_model") else model.model
        config = text.config
        self._check(config)
        self.vocabulary: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.embedding: nn.Module = text.embed_tokens
        self.final_norm: nn.Module = text.norm
        self.head: nn.Linear = model.lm_head
        self.dtype: torch.dtype = text.embed_tokens.weight.dtype
        self.device: torch.device = text.embed_tokens.weight.device
        rope = config.rope_parameters
        head_dim = text.config.head_dim
        rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        if not 2 <= rotary_dim <= head_dim:
            raise SpecError(f"rope parameter 'partial_rotary_factor' turns {rotary_dim} of {head_dim} channels")
        self._inverse, self._amplitude = rotary_frequencies(rope, rotary_dim, self.device)
        self.state_device = self.device
        self.traffic = TrafficMeter()
        self._qwen_layers = [
            Qwen35Layer(module, self._mixer(module, config, page_tokens, Exchange(context, self.traffic, index)))
            for index, module in enumerate(text.layers)
        ]
        self.layers: Sequence[Layer] = self._qwen_layers

    def segment(
        self,
        ownership: SegmentOwnership,
        *,
        state_gradient: bool,
        choices: Choices = "free",
        prefix_adapted: bool = True,
    ) -> Segment:
        """Return the segment with the rotary angles of its owned tokens."""
        cos_TD, sin_TD = rotary_angles(ownership.first, ownership.length, self._inverse, self._amplitude)
        return Segment(ownership, state_gradient, cos_TD, sin_TD, choices, prefix_adapted)

    def new_states(self, pool: ResidentPool, owners: Sequence[str], ownership: PromptOwnership) -> list[LayerState]:
        """Return empty states of all layers; they grow with the prompt."""
        del ownership
        return [layer.new_state(pool, owner) for layer, owner in zip(self._qwen_layers, owners, strict=True)]

    def _mixer(self, module: Any, config: Any, page_tokens: int, exchange: Exchange) -> GatedAttention | GatedDeltaNet:
        if hasattr(module, "linear_attn"):
            return GatedDeltaNet(module.linear_attn, dtype=self.dtype, exchange=exchange)
        return GatedAttention(
            module.self_attn,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            page_tokens=page_tokens,
            dtype=self.dtype,
            exchange=exchange,
        )

    @staticmethod
    def _check(config: Any) -> None:
        unknown = sorted(set(config.layer_types) - set(LAYER_KINDS))
        if unknown:
            raise SpecError(f"layer type {unknown[0]!r} is not supported; supported are {', '.join(LAYER_KINDS)}")
        if config.hidden_act != "silu":
            raise SpecError(f"activation {config.hidden_act!r} is not supported; use a model with 'silu'")

"""Bytes that one rank sends to the others, per layer and segment, with every token owned by one of CP ranks.

The formulas are those of `mixers/exchange/volume.py`, which a byte meter confirms, with shares that need not be whole;
here without torch, so that a plan prints at once.
"""

from collections import Counter
from dataclasses import dataclass

from longstraw_core.planning.architecture import (
    Architecture,
    Experts,
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layer,
)
from longstraw_core.planning.memory import FP32, Ranks


@dataclass(frozen=True)
class Pass:
    """One way through the layers."""

    backward: bool
    state_gradient: bool = False
    """Whether resident rows receive a gradient."""
    again: bool = False
    """Whether layers are recomputed in their backward."""
    recorded: bool = False
    """Of a prompt chunk that is captured and swept: where layers select, both send alike."""
    queries_apart: bool = False
    """Whether latent attention asks resident rows with queries of their own (adapter off on the prompt)."""

    def bytes(self, forward: float, backward: float) -> float:
        """What the pass sends when a layer's forward and backward send these."""
        return (1 + self.again) * forward + backward if self.backward else forward


def layer_traffic(layer: Layer, tokens: int, prefix: float, ranks: Ranks, element: int, way: Pass) -> float:
    """Return the bytes that one rank sends for a segment of `tokens` behind `prefix` resident ones in one layer."""
    mixer, network, cp = layer.mixer, layer.network, ranks.context
    sent = 0.0
    if cp == 1:
        pass
    elif isinstance(mixer, GatedDelta):
        sent += way.bytes(*_delta(mixer, tokens, cp, element))
    else:
        queries_travel, forward, backward = _attention(mixer, tokens, prefix, cp, element, way)
        sent += way.bytes(forward, backward)
        if isinstance(mixer, LatentAttention) and mixer.indexes:  # a recomputed layer does not select again
            sent += _index(mixer, tokens, prefix, cp, element, queries_travel=queries_travel)
    if isinstance(network, Experts) and ranks.expert > 1:
        others = (ranks.expert - 1) / ranks.expert
        each_way = 2 * tokens / cp * network.chosen * network.hidden * element * others
        sent += way.bytes(each_way, each_way)
    return sent


def state_traffic(layer: Layer, tokens: int, ranks: Ranks, element: int, way: Pass) -> float:
    """Return the same of the last layer in capture and sweep, of which only the state is wanted.

    Projected tokens go to their heads; outputs do not come back, and attention does not take place.
    """
    if ranks.context == 1 or not isinstance(layer.mixer, GatedDelta):
        return 0.0
    forward, backward = _delta(layer.mixer, tokens, ranks.context, element, outputs=False)
    return way.bytes(forward, backward)


def prompt_traffic(
    architecture: Architecture, tokens: int, chunk_tokens: int, ranks: Ranks, element: int, way: Pass
) -> float:
    """Return the bytes that one rank sends while a prompt goes through all layers chunk by chunk."""
    if ranks.context == 1 and ranks.expert == 1:
        return 0.0
    *layers, last = architecture.layers
    alike = Counter(layers)
    sent = 0.0
    for start in range(0, tokens, chunk_tokens):
        chunk = min(chunk_tokens, tokens - start)
        sent += sum(count * layer_traffic(layer, chunk, start, ranks, element, way) for layer, count in alike.items())
        sent += state_traffic(last, chunk, ranks, element, way)
    return sent


def _delta(mixer: GatedDelta, tokens: int, cp: int, element: int, *, outputs: bool = True) -> tuple[float, float]:
    repeated = max(1.0, cp / mixer.key_heads)
    width = 2 * mixer.keys * repeated + mixer.values + 2 * mixer.value_heads + (mixer.values if outputs else 0)
    sent = tokens * (cp - 1) / cp / cp * width * element
    return sent, sent


def _attention(
    mixer: FullAttention | LatentAttention, tokens: int, prefix: float, cp: int, element: int, way: Pass
) -> tuple[bool, float, float]:
    """Return whether queries travel rather than keys, and the bytes of forward and backward."""
    crossing = tokens * (cp - 1) / cp
    if isinstance(mixer, FullAttention):
        heads, query, value = mixer.heads, mixer.head_dim, mixer.head_dim
        row = 2 * mixer.key_heads * mixer.head_dim
    else:
        heads, query, value = mixer.heads, mixer.latent + mixer.rope, mixer.latent
        row = query

    def queries(kinds: int) -> tuple[float, float]:
        forward = kinds * query * element + (kinds * value + 1) * FP32
        backward = kinds * (query + value) * element + 2 * FP32 + kinds * query * FP32
        return crossing * heads * forward, crossing * heads * backward

    gathered = (prefix + tokens) * (cp - 1) / cp * row * element
    returned = tokens + (prefix if way.state_gradient or way.recorded else 0.0)
    keys = gathered, gathered + returned * (cp - 1) / cp * row * FP32
    forwards, backwards = (1, 1) if way.backward else (1, 0)
    if way.recorded and isinstance(mixer, LatentAttention):
        forwards, backwards = 2, 1

    def cost(sent: tuple[float, float]) -> float:
        return forwards * sent[0] + backwards * sent[1]

    if cost(queries(1)) <= cost(keys):
        return True, *queries(2 if way.queries_apart and isinstance(mixer, LatentAttention) else 1)
    return False, *keys


def _index(mixer: LatentAttention, tokens: int, prefix: float, cp: int, element: int, *, queries_travel: bool) -> float:
    """Bytes of one selection: index queries, candidates and cuts, or index keys and, for queries that then travel,
    what they selected."""
    selecting = tokens - min(max(mixer.selected - prefix, 0.0), tokens)
    candidates = min(mixer.selected, (prefix + tokens) / cp)
    asked = mixer.index_heads * (mixer.index_dim * element + FP32) + 8
    queries = selecting * (cp - 1) / cp * (asked + 8 * candidates)
    keys = (prefix + tokens) * (cp - 1) / cp * mixer.index_dim * element
    if queries <= keys:
        return queries
    told = tokens / cp * (cp - 1) * min(mixer.selected, prefix + tokens) * 4 if queries_travel else 0.0
    return keys + told

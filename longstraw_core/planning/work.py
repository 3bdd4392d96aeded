"""Floating-point operations and bytes between ranks, of capture, replay and reverse sweep.

A product [a, b] x [b, c] counts 2abc. Frozen weights need no gradient of their own, so a projection's backward costs as
much as its forward; that of the adapter and of the delta rule, whose two operands both have gradients, twice as much;
that of attention 2.5 times (five products instead of two).
Traffic: bytes that one rank sends, per layer and segment of n tokens, with every token owned by one of CP ranks.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from longstraw_core.planning.architecture import (
    Architecture,
    Experts,
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layer,
)
from longstraw_core.planning.memory import DELTA_CHUNK, FP32, Ranks
from longstraw_core.spec.receipts import GradientMode

_STATE_LINEARS = frozenset({"in_proj_qkv", "in_proj_b", "in_proj_a", "k_proj", "v_proj", "kv_a_proj_with_mqa"})
"""Projections that make a layer's state."""


@dataclass(frozen=True)
class Work:
    """Operations of all ranks together, and bytes sent by each rank, by phase."""

    capture: float
    replay: float
    sweep: float
    capture_traffic: float
    replay_traffic: float
    sweep_traffic: float

    @property
    def operations(self) -> float:
        """All phases."""
        return self.capture + self.replay + self.sweep

    @property
    def traffic(self) -> float:
        """All phases."""
        return self.capture_traffic + self.replay_traffic + self.sweep_traffic


def linear_operations(layer: Layer) -> float:
    """Forward operations per token that do not depend on the context: projections, chosen experts, delta rule."""
    mixer = layer.mixer
    total = sum(2.0 * linear.parameters for linear in layer.linears)
    if isinstance(layer.network, Experts):
        network = layer.network
        total += (
            2.0 * network.chosen * 3 * network.hidden * network.intermediate + 2.0 * network.hidden * network.experts
        )
    if isinstance(mixer, LatentAttention):
        total += sum(2.0 * linear.parameters for linear in mixer.indexer)
    return total + rule_operations(layer)


def rule_operations(layer: Layer) -> float:
    """Forward operations per token of the delta rule and its convolution; 0 where a layer has none."""
    mixer = layer.mixer
    if not isinstance(mixer, GatedDelta):
        return 0.0
    chunk, key, value = DELTA_CHUNK, mixer.key_dim, mixer.value_dim
    rule = 4 * chunk * key + chunk * (key + value) + 6 * key * value + 2 * chunk * value
    return mixer.value_heads * rule + 2.0 * mixer.channels * mixer.kernel


def adapter_operations(layer: Layer, targets: Collection[str], rank: int, *, state_only: bool = False) -> float:
    """Forward operations per token of the adapter's two products per adapted projection and chosen expert."""
    linears = layer.mixer.linears if state_only else layer.linears
    total = sum(
        2.0 * rank * (linear.inputs + linear.outputs)
        for linear in linears
        if linear.name in targets and not (state_only and linear.name not in _STATE_LINEARS)
    )
    if isinstance(layer.network, Experts) and not state_only:
        network = layer.network
        if "experts.gate_up_proj" in targets:
            total += 2.0 * rank * network.chosen * (network.hidden + 2 * network.intermediate)
        if "experts.down_proj" in targets:
            total += 2.0 * rank * network.chosen * (network.intermediate + network.hidden)
    return total


def state_operations(layer: Layer) -> float:
    """Forward operations per token that the last layer's state needs; of a prompt nobody reads more of it."""
    kept = sum(2.0 * linear.parameters for linear in layer.mixer.linears if linear.name in _STATE_LINEARS)
    return kept + rule_operations(layer)


def context_operations(layer: Layer, context: float) -> tuple[float, float]:
    """Forward operations of one token over `context` tokens: (attention, scoring without a gradient)."""
    mixer = layer.mixer
    if isinstance(mixer, FullAttention):
        return 4.0 * mixer.heads * mixer.head_dim * context, 0.0
    if isinstance(mixer, LatentAttention):
        seen = min(context, mixer.selected)
        attention = 2.0 * mixer.heads * (2 * mixer.latent + mixer.rope) * seen
        # every head's product, and the weighted sum over heads
        return attention, 2.0 * mixer.index_heads * (mixer.index_dim + 1) * context if mixer.indexes else 0.0
    return 0.0, 0.0


def prompt_operations(layer: Layer, tokens: int) -> tuple[float, float]:
    """Forward operations per token, on average over a prompt: (attention, scoring without a gradient).

    A token sees what is before it. A selecting layer attends to all of the first `selected` tokens without scoring
    them, and behind these to as many as it selects.
    """
    mixer = layer.mixer
    if not isinstance(mixer, LatentAttention) or tokens == 0:
        return context_operations(layer, tokens / 2)
    first = min(mixer.selected, tokens)
    attention, _ = context_operations(layer, first * (tokens - first / 2) / tokens)
    _, scoring = context_operations(layer, (tokens**2 - first**2) / (2 * tokens))
    return attention, scoring


def layer_traffic(layer: Layer, tokens: int, prefix: float, ranks: Ranks, element: int) -> tuple[float, float]:
    """Bytes that one rank sends for a segment in one layer: (forward, backward).

    Attention sends queries to the keys, or gathers the prefix's keys, whichever is less.
    """
    mixer, network = layer.mixer, layer.network
    cp = ranks.context
    crossing = tokens * (cp - 1) / cp
    forward = backward = 0.0
    if isinstance(mixer, FullAttention):
        width, gathered = mixer.heads * mixer.head_dim, 2 * mixer.key_heads * mixer.head_dim * element
        forward = min(
            crossing * (width * element + (width + mixer.heads) * FP32), _gather(prefix + tokens, cp, gathered)
        )
        backward = min(
            crossing * (3 * width * element + 4 * mixer.heads + width * FP32),
            _gather(prefix + tokens, cp, gathered + 2 * mixer.key_heads * mixer.head_dim * FP32),
        )
    elif isinstance(mixer, LatentAttention):
        row = mixer.latent + mixer.rope
        absorbed, partial = mixer.heads * row, mixer.heads * mixer.latent
        forward = min(
            crossing * (absorbed * element + (partial + mixer.heads) * FP32),
            _gather(prefix + tokens, cp, row * element),
        )
        backward = min(
            crossing * ((absorbed + 2 * partial) * element + 4 * mixer.heads + absorbed * FP32),
            _gather(prefix + tokens, cp, row * (element + FP32)),
        )
        if mixer.indexes:
            queries = (mixer.index_heads * mixer.index_dim + mixer.index_heads) * element
            forward += crossing * (queries + 8 * mixer.selected + 8)
    else:
        repeated = max(1.0, cp / mixer.key_heads)
        width = 2 * mixer.keys * repeated + 2 * mixer.values + 2 * mixer.value_heads
        forward = backward = crossing / cp * width * element
    if isinstance(network, Experts) and ranks.expert > 1:
        exchanged = 2 * tokens / cp * network.chosen * network.hidden * element * (ranks.expert - 1) / ranks.expert
        forward, backward = forward + exchanged, backward + exchanged
    return forward, backward


def _gather(tokens: float, cp: int, bytes_per_token: float) -> float:
    return tokens * (cp - 1) / cp * bytes_per_token


def transaction_work(
    architecture: Architecture,
    ranks: Ranks,
    *,
    gradient: GradientMode,
    targets: Collection[str],
    rank: int,
    element: int,
    chunk_tokens: int,
    checkpoint_layers: bool,
    prompt_tokens: int,
    response_tokens: int,
    group: int,
    weights_sent: Sequence[float] = (),
) -> Work:
    """Return the work of one prompt's group: capture once, replay every response, sweep the prompt in mode `exact`.

    `weights_sent` is what a rank sends to make each layer whole: once in a pass, twice in one with a backward but for
    the last layer, which is still there.
    """
    again = 1.0 if checkpoint_layers else 0.0
    head = 2.0 * architecture.hidden * architecture.vocabulary
    captured = max(prompt_tokens - 1, 0)
    capture = replay = sweep = 0.0
    capture_sent = replay_sent = sweep_sent = 0.0
    chunks = -(-captured // chunk_tokens)
    last = len(architecture.layers) - 1
    for number, layer in enumerate(architecture.layers):
        rule = rule_operations(layer)
        # of a prompt nobody reads what the last layer makes of it, only its state
        state_only = number == last
        linear = (state_operations(layer) if state_only else linear_operations(layer)) - rule
        adapter = adapter_operations(layer, targets, rank, state_only=state_only)
        attention, scoring = (0.0, 0.0) if state_only else prompt_operations(layer, captured)
        capture += captured * (linear + rule + attention + scoring)
        if gradient != "response_adapter":
            capture += captured * adapter
        if gradient == "exact":
            sweep += captured * ((2 + again) * linear + (3 + again) * (rule + adapter))
            sweep += captured * ((3.5 + again) * attention + scoring)

        linear = linear_operations(layer) - rule
        adapter = adapter_operations(layer, targets, rank)
        attention, scoring = context_operations(layer, prompt_tokens + response_tokens / 2)
        replay += group * response_tokens * ((2 + again) * linear + (3 + again) * (rule + adapter))
        replay += group * response_tokens * ((3.5 + again) * attention + scoring)

        forward, backward = layer_traffic(layer, min(chunk_tokens, captured), captured / 2, ranks, element)
        capture_sent += chunks * forward
        if gradient == "exact":
            sweep_sent += chunks * ((1 + again) * forward + backward)
        forward, backward = layer_traffic(layer, response_tokens, prompt_tokens, ranks, element)
        replay_sent += group * ((1 + again) * forward + backward)
    once = sum(weights_sent)
    twice = 2 * once - weights_sent[-1] if weights_sent else 0.0
    capture_sent, replay_sent = capture_sent + chunks * once, replay_sent + group * twice
    if gradient == "exact":
        sweep_sent += chunks * twice
    replay += group * response_tokens * 3 * head  # logits, logits again in backward, gradient of the hidden state
    return Work(capture, replay, sweep, capture_sent, replay_sent, sweep_sent)

"""Floating-point operations and bytes between ranks, of capture, replay and reverse sweep.

A product [a, b] x [b, c] counts 2abc. Frozen weights need no gradient of their own, so a projection's backward costs as
much as its forward; that of the adapter and of the delta rule, whose two operands both have gradients, twice as much;
that of attention 2.5 times (five products instead of two), 1.5 times where keys and values need no gradient.
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
from longstraw_core.planning.memory import DELTA_CHUNK, Ranks
from longstraw_core.planning.traffic import Pass, layer_traffic, prompt_traffic
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


def replay_operations(
    layer: Layer, prompt: int, response: int, gradient: GradientMode, *, apart: bool, again: float
) -> tuple[float, float]:
    """Operations per response token, on average: (attention forward and backward, scoring without a gradient).

    Only `exact` asks for the gradient of resident keys and values; of the five products of a backward the others make
    three there, and all five over the response's own tokens. `apart`: latent attention asks resident tokens with
    queries of its own, so that every product with queries is made twice.
    """
    attention, scoring = context_operations(layer, prompt + response / 2)
    own = attention * response / (2 * prompt + response)
    if gradient == "exact":
        return (3.5 + again) * attention, scoring
    twice = 2 if apart and isinstance(layer.mixer, LatentAttention) else 1
    return twice * (2.5 + again) * attention + own, scoring


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
    exact, apart = gradient == "exact", gradient == "response_adapter" and "kv_b_proj" in targets
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
        if exact:
            sweep += captured * ((2 + again) * linear + (3 + again) * (rule + adapter))
            sweep += captured * ((3.5 + again) * attention + scoring)

        linear = linear_operations(layer) - rule
        adapter = adapter_operations(layer, targets, rank)
        attention, scoring = replay_operations(
            layer, prompt_tokens, response_tokens, gradient, apart=apart, again=again
        )
        replay += group * response_tokens * ((2 + again) * linear + (3 + again) * (rule + adapter))
        replay += group * response_tokens * (attention + scoring)

    recomputed = checkpoint_layers
    replaying = Pass(backward=True, state_gradient=exact, again=recomputed, queries_apart=apart)
    replay_sent = group * sum(
        layer_traffic(layer, response_tokens, captured, ranks, element, replaying) for layer in architecture.layers
    )
    sweeping = Pass(backward=True, state_gradient=True, again=recomputed, recorded=True)
    capture_sent = prompt_traffic(
        architecture, captured, chunk_tokens, ranks, element, Pass(backward=False, recorded=exact)
    )
    sweep_sent = prompt_traffic(architecture, captured, chunk_tokens, ranks, element, sweeping) if exact else 0.0
    once = sum(weights_sent)
    twice = 2 * once - weights_sent[-1] if weights_sent else 0.0
    capture_sent, replay_sent = capture_sent + chunks * once, replay_sent + group * twice
    if exact:
        sweep_sent += chunks * twice
    replay += group * response_tokens * 3 * head  # logits, logits again in backward, gradient of the hidden state
    return Work(capture, replay, sweep, capture_sent, replay_sent, sweep_sent)

"""Bytes: weights, adapter with optimizer, resident state and what autograd keeps, of one rank.

What autograd keeps was read off the engine by listing every storage that its graph saves
(`torch.autograd.graph.saved_tensors_hooks`), and is written here per layer kind as a function of the widths.
"""

from collections.abc import Collection
from dataclasses import dataclass

from longstraw_core.planning.architecture import (
    DELTA_CHUNK,
    FP32,
    Architecture,
    Dense,
    Experts,
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layer,
    Linear,
)
from longstraw_core.planning.capture import chunk_peak
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec

NF4_BYTES = 0.5 + FP32 / 64
OPTIMIZER_BYTES = 16
"""Per trained parameter: fp32 weight, gradient and AdamW's two moments."""
HEAD_TILE_TOKENS, HEAD_TILE_VOCABULARY = 512, 16384


@dataclass(frozen=True)
class Ranks:
    """How many ranks share the tokens, and the experts."""

    context: int = 1
    expert: int = 1


def adapter_parameters(architecture: Architecture, targets: Collection[str], rank: int) -> int:
    """Number of trained parameters: rank · (inputs + outputs) per adapted projection and per adapted expert."""
    total = 0
    for layer in architecture.layers:
        total += sum(rank * (linear.inputs + linear.outputs) for linear in layer.linears if linear.name in targets)
        if isinstance(layer.network, Experts):
            network = layer.network
            if "experts.gate_up_proj" in targets:
                total += network.experts * rank * (network.hidden + 2 * network.intermediate)
            if "experts.down_proj" in targets:
                total += network.experts * rank * (network.intermediate + network.hidden)
    return total


@dataclass(frozen=True)
class Weights:
    """Bytes of the frozen weights on one rank."""

    kept: float
    """All the time."""
    on_use: float
    """Of the largest layer while it is whole, twice while NF4 is decoded; 0 when all layers are whole all the time."""
    sent: tuple[float, ...]
    """What a rank sends to make each layer whole."""


def base_weights(architecture: Architecture, ranks: Ranks, *, element: int, sharded: bool, quantised: bool) -> Weights:
    """Return where the frozen weights are.

    Args:
        architecture: The model.
        ranks: Context ranks keep a share each of every layer when `sharded`, but for experts that are divided already.
        element: Bytes per element of the model's data type.
        sharded: Whether layers are gathered on use.
        quantised: Whether they are in NF4: four bits, and an fp32 scale for every 64.
    """
    shares = ranks.context if sharded else 1
    form = NF4_BYTES if quantised else float(element)
    kept, largest = float(element * architecture.embedding_parameters), 0.0
    sent = []
    for layer in architecture.layers:
        experts = layer.expert_parameters / ranks.expert
        own = experts if ranks.expert > 1 else 0.0  # this rank's alone
        whole = layer.choosing_parameters if quantised else 0
        shared = layer.dense_parameters - whole + experts - own
        kept += whole * element + shared * form / shares + own * form
        on_use = shared + own if quantised else shared
        largest = max(largest, element * on_use * (2 if quantised else 1))
        sent.append(shared * form / shares * (shares - 1))
    return Weights(kept, largest if shares > 1 or quantised else 0.0, tuple(sent))


@dataclass(frozen=True)
class StateBytes:
    """Resident state of one prompt, of all ranks together, by purpose; as the engine's `StateBytes`."""

    pages: int
    recurrent: int
    boundaries: int
    gradient_sinks: int
    choices: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.pages + self.recurrent + self.boundaries + self.gradient_sinks + self.choices


def resident_state(
    architecture: Architecture, layout: LayoutSpec, gradient: GradientMode, element: int, prompt_tokens: int
) -> StateBytes:
    """Return the state of a prompt: K/V or latent pages, recurrent state, its copies per chunk, sinks, choices.

    Args:
        architecture: The model.
        layout: Page and chunk sizes, and what is recorded of a selection.
        gradient: Only `exact` keeps what the reverse sweep needs.
        element: Bytes per element of the model's data type.
        prompt_tokens: Length of the prompt; all tokens but the last are captured.
    """
    tokens = prompt_tokens - 1
    exact = gradient == "exact"
    page = layout.page_tokens
    paged = -(-tokens // page) * page
    boundaries = max(-(-tokens // layout.prompt_chunk_tokens) - 1, 0) if exact else 0
    pages = recurrent = kept = sinks = choices = 0
    last = len(architecture.layers) - 1
    for index, layer in enumerate(architecture.layers):
        mixer = layer.mixer
        if isinstance(mixer, FullAttention):
            width = 2 * mixer.key_heads * mixer.head_dim
            pages += paged * width * element
            sinks += paged * width * FP32
        elif isinstance(mixer, GatedDelta):
            state = mixer.value_heads * mixer.key_dim * mixer.value_dim * FP32
            tail = mixer.channels * (mixer.kernel - 1)
            if tokens:
                recurrent += state + tail * element
                kept += boundaries * (state + tail * element)
            sinks += state + tail * FP32
        else:
            width = mixer.latent + mixer.rope
            pages += paged * (width + (mixer.index_dim if mixer.indexes else 0)) * element
            sinks += paged * width * FP32
            if exact and index != last:
                choices += _choices(layer, mixer, layout, tokens)
    return StateBytes(pages, recurrent, kept, sinks if exact else 0, choices)


def _choices(layer: Layer, mixer: LatentAttention, layout: LayoutSpec, tokens: int) -> int:
    selecting = max(tokens - mixer.selected, 0) if mixer.indexes else 0
    per_selection = 8
    if layout.selection_record == "positions":
        per_selection = mixer.selected * (2 if tokens <= 1 << 16 else 4)
    total = selecting * per_selection
    if isinstance(layer.network, Experts):
        total += tokens * layer.network.chosen * (1 if layer.network.experts <= 256 else 4)
    return total


def layer_activation_bytes(layer: Layer, targets: Collection[str], rank: int, element: int) -> float:
    """Return the bytes per token that autograd keeps of one layer between its forward and its backward.

    Args:
        layer: The layer.
        targets: Names of adapted projections.
        rank: Rank of the adapter, whose weights are fp32: in a narrower model its inputs are copied to fp32.
        element: Bytes per element of the model's data type.
    """
    mixer, network = layer.mixer, layer.network
    total = 2.0 * layer.mixer.hidden * FP32  # both norms keep their input in fp32
    total += _adapter_inputs(mixer.linears, targets, rank, element)
    total += _adapter_inputs(network.linears, targets, rank, element)
    if isinstance(mixer, GatedDelta):
        total += _delta_bytes(mixer, element)
    elif isinstance(mixer, FullAttention):
        total += _attention_bytes(mixer, element)
    else:
        total += _latent_bytes(mixer, "kv_b_proj" in targets, rank, element)
    if isinstance(network, Dense):
        return total + 3 * network.intermediate * element  # gate, up and silu(gate)
    shared = 3 * network.shared.intermediate * element
    routed = network.chosen * (3 * network.intermediate + network.hidden) * element
    indices = network.chosen * (8 + 2 * 8 + 2 * FP32)
    adapted = 0
    if "experts.gate_up_proj" in targets:  # every chosen row's input, and what the first half makes of it
        adapted += network.chosen * (network.hidden + rank) * FP32
    if "experts.down_proj" in targets:
        adapted += network.chosen * (network.intermediate + rank) * FP32
    return total + shared + routed + adapted + indices + network.experts * FP32


def _adapter_inputs(linears: Collection[Linear], targets: Collection[str], rank: int, element: int) -> float:
    """Inputs of the adapted projections, and what the adapter's first half makes of them.

    In an fp32 model projections that read the same tensor share it; else each keeps its own fp32 copy.
    """
    adapted = [linear for linear in linears if linear.name in targets and linear.name != "kv_b_proj"]
    if element == FP32:
        # q_b_proj's input is normalised from q_a_proj's output: another tensor even where the widths agree
        tensors = {(linear.name == "q_b_proj", _is_last(linear), linear.inputs) for linear in adapted}
        widths = sum(inputs for _, _, inputs in tensors)
    else:
        widths = sum(linear.inputs for linear in adapted)
    return FP32 * (widths + rank * len(adapted))


def _is_last(linear: Linear) -> bool:
    """Whether a projection reads the end of its block rather than the normalised hidden state."""
    return linear.name in ("out_proj", "o_proj", "down_proj")


def _delta_bytes(mixer: GatedDelta, element: int) -> float:
    heads, keys, values = mixer.value_heads, mixer.value_heads * mixer.key_dim, mixer.values
    convolution = 2 * mixer.channels * element  # its input and its output
    normalised = (mixer.channels if element == FP32 else 2 * mixer.keys) * FP32
    matrices = 5 * DELTA_CHUNK * heads * FP32
    # 9 widths of keys and 4 of values: padded q, k, v, the operands of every product, solutions of both systems
    rule = (9 * keys + 4 * values) * FP32
    states = 2 * heads * mixer.key_dim * mixer.value_dim / DELTA_CHUNK * FP32
    gated_norm = 3 * values * FP32 + values * element
    small = (8 * heads + 4 * mixer.key_heads) * FP32
    return convolution + normalised + matrices + rule + states + gated_norm + small


def _attention_bytes(mixer: FullAttention, element: int) -> float:
    width, keys = mixer.heads * mixer.head_dim, mixer.key_heads * mixer.head_dim
    queries = 2 * width * FP32 if element == FP32 else width * FP32  # with the gate beside them, or a copy without
    return queries + keys * FP32 + (3 * width + 2 * keys) * element + (2 * mixer.heads + mixer.key_heads) * FP32


def _latent_bytes(mixer: LatentAttention, adapted: bool, rank: int, element: int) -> float:
    heads, row = mixer.heads, mixer.latent + mixer.rope
    queries = heads * ((mixer.nope + mixer.rope) if element == FP32 else mixer.nope) * FP32
    absorbed = heads * row * element
    latents_out = heads * mixer.latent * FP32
    low_rank = (mixer.query_rank + row) * FP32 + row * element
    absorbed_adapter = 2 * heads * rank * FP32 if adapted else 0
    selection = mixer.selected * 4 if mixer.indexes else 0
    return queries + absorbed + latents_out + low_rank + absorbed_adapter + selection


@dataclass(frozen=True)
class Activations:
    """What a pass through the layers takes on one rank at most, graph and temporaries, in bytes."""

    replay: float
    sweep: float
    capture: float = 0.0
    """Of a chunk on its way through the layers, without a graph."""

    @property
    def peak(self) -> float:
        """The largest; they are never alive together."""
        return max(self.capture, self.replay, self.sweep)


def activation_peak(
    architecture: Architecture,
    layout: LayoutSpec,
    ranks: Ranks,
    *,
    gradient: GradientMode,
    targets: Collection[str],
    rank: int,
    element: int,
    response_tokens: int,
    prompt_tokens: int,
) -> Activations:
    """Return the peak of a captured chunk, of a replayed response, and of a swept chunk (mode `exact`).

    With `layout.checkpoint_layers` every layer keeps its input, and one layer at a time everything.
    """
    layers = [layer_activation_bytes(layer, targets, rank, element) for layer in architecture.layers]
    temporary = max(_temporary_bytes(layer) for layer in architecture.layers)
    gathered = max(_gathered_bytes(layer, ranks, element) for layer in architecture.layers)

    def graph(tokens: int, bodies: list[float]) -> float:
        own = -(-tokens // ranks.context)
        if layout.checkpoint_layers:
            kept = len(bodies) * architecture.hidden * element + max(bodies, default=0.0)
        else:
            kept = sum(bodies)
        return own * (kept + temporary) + tokens * gathered

    head_rows = min(HEAD_TILE_TOKENS, -(-response_tokens // ranks.context))
    head = 3 * head_rows * min(HEAD_TILE_VOCABULARY, architecture.vocabulary) * FP32
    replay = graph(response_tokens, layers) + head
    chunk = min(layout.prompt_chunk_tokens, max(prompt_tokens - 1, 0))
    capture = chunk_peak(architecture.layers[:-1], chunk, ranks.context, element)
    if gradient != "exact":
        return Activations(replay, 0.0, capture)
    # the last layer of a swept chunk stops at its state; what layers produce is held with its gradient to the end
    own = -(-chunk // ranks.context)
    produced = own * sum(_produced_bytes(layer, element) for layer in architecture.layers)
    return Activations(replay, graph(chunk, layers[:-1]) + produced, capture)


def _produced_bytes(layer: Layer, element: int) -> float:
    """Per token: keys and values, or the latent row, and their gradients."""
    mixer = layer.mixer
    if isinstance(mixer, FullAttention):
        return 2 * mixer.key_heads * mixer.head_dim * (element + FP32)
    if isinstance(mixer, LatentAttention):
        return (mixer.latent + mixer.rope) * (element + FP32)
    return 0.0


def _temporary_bytes(layer: Layer) -> float:
    """Per token: what the backward of one layer makes and drops again, measured as its widest tensors."""
    mixer, network = layer.mixer, layer.network
    widths = [2 * layer.mixer.hidden]
    if isinstance(mixer, GatedDelta):
        widths.append(6 * DELTA_CHUNK * mixer.value_heads)  # of both systems, their products and their gradients
    if isinstance(mixer, FullAttention):
        widths.append(4 * mixer.heads * mixer.head_dim)
    if isinstance(mixer, LatentAttention):
        widths.append(2 * mixer.heads * (mixer.latent + mixer.rope))
    if isinstance(network, Experts):
        widths.append(network.chosen * (network.hidden + 2 * network.intermediate))
    else:
        widths.append(2 * network.intermediate)
    return FP32 * max(widths)


def _gathered_bytes(layer: Layer, ranks: Ranks, element: int) -> float:
    """Per token of the whole segment, in the backward of a layer whose queries visit every rank.

    Queries and output gradients as gathered and apart, and fp32 partials of the queries' gradient as computed and as
    received; latent attention also takes the output gradients in fp32.
    """
    if ranks.context == 1:
        return 0.0
    mixer = layer.mixer
    if isinstance(mixer, FullAttention):
        return mixer.heads * mixer.head_dim * (4 * element + 2 * FP32)
    if isinstance(mixer, LatentAttention):
        row, latent = mixer.latent + mixer.rope, mixer.latent
        widened = 0 if element == FP32 else latent * FP32
        return mixer.heads * (2 * (row + latent) * element + widened + 2 * row * FP32)
    return 0.0

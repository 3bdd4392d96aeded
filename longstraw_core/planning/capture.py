"""What a chunk takes on one rank while it goes through the layers without autograd: nothing is kept between layers.

Read off the engine by listing the storages that are alive at the peak of each layer kind. Kernels' own tiles, which do
not grow with the chunk, are left out.
"""

from collections.abc import Sequence

from longstraw_core.planning.architecture import (
    DELTA_CHUNK,
    FP32,
    Dense,
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layer,
)


def chunk_peak(layers: Sequence[Layer], tokens: int, context_ranks: int, element: int) -> float:
    """Return the bytes that a chunk of `tokens` takes at most on one of the ranks that share it."""
    own = -(-tokens // context_ranks)
    visitors = tokens if context_ranks > 1 else 0
    return max(
        (own * chunk_bytes(layer, element) + visitors * visiting_bytes(layer, element) for layer in layers), default=0.0
    )


def chunk_bytes(layer: Layer, element: int) -> float:
    """Return the bytes per owned token at a layer's peak, in its mixer or in its network."""
    mixer = layer.mixer
    if isinstance(mixer, GatedDelta):
        most = _delta_bytes(mixer, element)
    elif isinstance(mixer, FullAttention):
        width, keys = mixer.heads * mixer.head_dim, mixer.key_heads * mixer.head_dim
        most = width * (4 * FP32 + 3 * element) + 2 * keys * element
    else:
        most = max(_selecting_bytes(mixer, element), _absorbed_bytes(mixer, element))
    return max(most, _network_bytes(layer, element)) + 2 * mixer.hidden * element  # the residual and its norm


def visiting_bytes(layer: Layer, element: int) -> float:
    """Return the bytes per token of the whole chunk when queries visit every rank: queries, then partial outputs as
    computed, packed and received."""
    mixer = layer.mixer
    if isinstance(mixer, FullAttention):
        return mixer.heads * mixer.head_dim * (element + 3 * FP32)
    if isinstance(mixer, LatentAttention):
        return mixer.heads * ((mixer.latent + mixer.rope) * element + 3 * mixer.latent * FP32)
    return 0.0


def _delta_bytes(mixer: GatedDelta, element: int) -> float:
    convolution = 4 * mixer.channels * element  # projected, behind the tail, convolved, activated
    matrices = 3 * DELTA_CHUNK * mixer.value_heads * FP32
    # padded q, k, v and both right-hand sides with their solutions, 9 widths of keys and 4 of values
    rule = (9 * mixer.value_heads * mixer.key_dim + 4 * mixer.values) * FP32
    return convolution + matrices + rule + 2 * mixer.keys * FP32


def _selecting_bytes(mixer: LatentAttention, element: int) -> float:
    """While an index layer selects: its positions as found (a row and a column each), joined, and the last ones."""
    narrow = 2 * mixer.query_rank + 4 * mixer.latent + 3 * mixer.rope
    projected = (mixer.heads * (mixer.nope + mixer.rope) + narrow) * element
    if not mixer.indexes:
        return projected + 4 * mixer.selected
    index = (mixer.index_heads + 1) * mixer.index_dim * element + mixer.index_heads * FP32
    return projected + index + (16 + 8 + 4) * mixer.selected


def _absorbed_bytes(mixer: LatentAttention, element: int) -> float:
    """While it attends: queries as projected, in the latent space and with their rope part, and the output in fp32."""
    queries = (mixer.nope + mixer.rope + 2 * mixer.latent + mixer.rope) * element
    return mixer.heads * (queries + mixer.latent * FP32) + 4 * mixer.selected


def _network_bytes(layer: Layer, element: int) -> float:
    mixer, network = layer.mixer, layer.network
    selection = 4 * mixer.selected if isinstance(mixer, LatentAttention) else 0
    if isinstance(network, Dense):
        return selection + 4 * network.intermediate * element
    # chosen rows as sorted, computed, weighted and put back, two of them in fp32
    rows = network.hidden * (3 * element + 2 * FP32) + 3 * network.intermediate * element
    return selection + network.chosen * rows

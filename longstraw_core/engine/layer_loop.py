"""The one pass through the layers that capture, replay and sweep share."""

from collections.abc import Callable

import torch

from longstraw_core.mixers.family import Family
from longstraw_core.mixers.segment import Segment
from longstraw_core.resident.layer_state import Produced
from longstraw_core.resident.prefix_state import PrefixState

OnProduced = Callable[[int, Produced], None]


def run_layers(
    family: Family,
    token_ids_T: torch.Tensor,
    segment: Segment,
    state: PrefixState,
    *,
    last_layer_state_only: bool,
    on_produced: OnProduced | None = None,
) -> torch.Tensor | None:
    """Feed a segment through all layers.

    Args:
        family: the bound model.
        token_ids_T: token ids of the segment, int64 [T].
        segment: where the segment stands and whether the state's gradient is wanted.
        state: resident state of the tokens before the segment.
        last_layer_state_only: nothing reads the last layer's output (capture, sweep), so leave it out.
        on_produced: called with (layer, produced state tensors) as soon as a layer is done.

    Returns:
        Hidden states before the final norm [T, H], or None with `last_layer_state_only`.
    """
    x_TH = family.embedding(token_ids_T)
    last = len(family.layers) - 1
    for index, layer in enumerate(family.layers):
        state_only = last_layer_state_only and index == last
        mixed = layer.mix(x_TH, segment, state.layers[index], state_only=state_only)
        if on_produced is not None:
            on_produced(index, mixed.produced)
        if mixed.y_TH is None:
            return None
        x_TH = x_TH + mixed.y_TH
        x_TH = x_TH + layer.feed_forward(x_TH, segment, state.layers[index])
    return x_TH

"""The one pass through the layers that capture, replay and sweep share."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from longstraw_core.mixers.family import Family, Layer
from longstraw_core.mixers.layer_weights import WeightsOnUse
from longstraw_core.mixers.segment import Segment
from longstraw_core.resident.layer_state import LayerState, Produced
from longstraw_core.resident.prefix_state import PrefixState

OnProduced = Callable[[int, Produced], None]


def run_layers(
    family: Family,
    token_ids_T: torch.Tensor,
    segment: Segment,
    state: PrefixState,
    *,
    last_layer_state_only: bool,
    checkpoint_layers: bool = False,
    on_produced: OnProduced | None = None,
    weights: WeightsOnUse | None = None,
) -> torch.Tensor | None:
    """Feed a segment through all layers.

    Args:
        family: the bound model.
        token_ids_T: token ids of the segment, int64 [T].
        segment: where the segment stands and whether the state's gradient is wanted.
        state: resident state of the tokens before the segment.
        last_layer_state_only: nothing reads the last layer's output (capture, sweep), so leave it out.
        checkpoint_layers: with autograd, keep only each layer's input and recompute the layer in its backward.
        on_produced: called with (layer, produced state tensors) as soon as a layer is done.
        weights: what makes a layer's weights whole while it is used, where they are not always whole.

    Returns:
        Hidden states before the final norm [T, H], or None with `last_layer_state_only`.
    """
    x_TH = family.embedding(token_ids_T)
    last = len(family.layers) - 1
    for index, layer in enumerate(family.layers):
        state_only = last_layer_state_only and index == last
        if weights is not None:
            weights.use(index)
        if checkpoint_layers and torch.is_grad_enabled():
            # no dropout anywhere: the recomputation needs no random state
            out_TH, produced = checkpoint(
                _run_layer,
                layer,
                x_TH,
                segment,
                state.layers[index],
                state_only,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            out_TH, produced = _run_layer(layer, x_TH, segment, state.layers[index], state_only)
        if weights is not None:
            weights.use_in_backward(index, (out_TH, *produced))
        if on_produced is not None:
            on_produced(index, produced)
        if out_TH is None:
            return None
        x_TH = out_TH
    return x_TH


def _run_layer(
    layer: Layer, x_TH: torch.Tensor, segment: Segment, state: LayerState, state_only: bool
) -> tuple[torch.Tensor | None, Produced]:
    mixed = layer.mix(x_TH, segment, state, state_only=state_only)
    if mixed.y_TH is None:
        return None, mixed.produced
    x_TH = x_TH + mixed.y_TH
    return x_TH + layer.feed_forward(x_TH, segment, state), mixed.produced

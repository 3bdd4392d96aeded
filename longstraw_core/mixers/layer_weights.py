"""Frozen matrices of decoder layers that are whole only while their layer is used.

The matrices of a layer lie end to end in one flat run. Every rank keeps an equal share of it, in the model's dtype or
quantised; the run is put together before the layer's forward, and again before its backward, and is gone when another
layer is used. Autograd keeps views of the run, whose memory comes and goes under them: equal bits every time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.expert_shard import is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.mixers.exchange.traffic import TrafficMeter

ALIGNMENT = 64
"""Elements: every matrix starts at a multiple, so that a block of a quantised run belongs to one matrix."""
_ATTRIBUTE = "weights_on_use"
_CHOOSING = frozenset({"gate", "indexer"})
"""Modules that choose experts and tokens: never quantised, a choice is not a matter of rounding."""


@dataclass(frozen=True)
class Part:
    """Consecutive elements of one matrix that belong to one rank's share."""

    matrix: int
    first: int
    """Element of the matrix."""
    place: int
    """Element of the share."""
    count: int


@dataclass(frozen=True)
class FlatLayout:
    """Where the matrices of one layer lie in its flat run, and how the run is shared."""

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    share: int
    """Elements per rank."""
    ranks: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], ranks: int) -> "FlatLayout":
        """Lay matrices of these shapes end to end."""
        starts, end = [], 0
        for shape in shapes:
            starts.append(end)
            end = _aligned(end + torch.Size(shape).numel(), ALIGNMENT)
        return cls(tuple(shapes), tuple(starts), _aligned(end, ALIGNMENT * ranks) // ranks, ranks)

    def parts(self, rank: int) -> Iterator[Part]:
        """Yield what a rank's share is made of."""
        begin, end = rank * self.share, (rank + 1) * self.share
        for matrix, (shape, start) in enumerate(zip(self.shapes, self.starts, strict=True)):
            first, last = max(start, begin), min(start + torch.Size(shape).numel(), end)
            if first < last:
                yield Part(matrix, first - start, first - begin, last - first)


def _aligned(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


class KeptShare(Protocol):
    """A rank's share of a flat run, in the form in which it stays in memory."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        ...

    def put_together(self, exchange: Exchange, flat: torch.Tensor) -> None:
        """Fill the flat run from the shares of all ranks."""
        ...


class PlainShare:
    """A share in the model's dtype."""

    def __init__(self, share: torch.Tensor) -> None:
        self._share = share

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self._share.nbytes

    def put_together(self, exchange: Exchange, flat: torch.Tensor) -> None:
        """Fill the flat run from the shares of all ranks."""
        exchange.gather_into(flat, self._share, "weights")


class LayerWeights:
    """Frozen matrices of one layer.

    Args:
        parameters: parameters of the layer, in the order of the layout; their data are replaced.
        layout: where they lie.
        kept: this rank's share.
        group: the ranks that have the others.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: FlatLayout, kept: KeptShare, group: RankGroup
    ) -> None:
        self.kept = kept
        self.group = group
        self._parameters = parameters
        first = parameters[0]
        self._flat = torch.empty(layout.share * layout.ranks, dtype=first.dtype, device=first.device)
        self._bytes = self._flat.nbytes
        self._views = [
            self._flat[start : start + torch.Size(shape).numel()].view(shape)
            for shape, start in zip(layout.shapes, layout.starts, strict=True)
        ]
        # Whoever uses a layer that is not there computes with NaN instead of reading memory that is gone.
        self._absent = [absent_weight(shape, first.dtype, first.device) for shape in layout.shapes]
        self.drop()

    def put_together(self, exchange: Exchange) -> None:
        """Make the matrices whole."""
        self._flat.untyped_storage().resize_(self._bytes)
        # `.data`: what autograd saved is the same again, so its version must not move
        self.kept.put_together(exchange, self._flat.data)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    def drop(self) -> None:
        """Give the memory of the whole matrices back."""
        for parameter, absent in zip(self._parameters, self._absent, strict=True):
            parameter.data = absent
        self._flat.untyped_storage().resize_(0)


def absent_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return NaN of the given shape in the memory of one element."""
    return torch.full((1,), float("nan"), dtype=dtype, device=device).expand(shape)


class WeightsOnUse:
    """The layers of a model of which one at a time is whole.

    Args:
        layers: the flat runs of every layer. All ranks use layers in the same order.
    """

    def __init__(self, layers: Sequence[Sequence[LayerWeights]]) -> None:
        self._layers = layers
        self._meter = TrafficMeter()
        self._present: int | None = None

    @property
    def kept_bytes(self) -> int:
        """Memory of this rank's shares of all layers."""
        return sum(run.kept.nbytes for layer in self._layers for run in layer)

    def count_with(self, meter: TrafficMeter) -> None:
        """Count what is sent with this meter from now on."""
        self._meter = meter

    def use(self, index: int) -> None:
        """Make a layer whole; it stays so until another one is used."""
        if index == self._present:
            return
        if self._present is not None:
            for run in self._layers[self._present]:
                run.drop()
        for run in self._layers[index]:
            run.put_together(Exchange(run.group, self._meter, index))
        self._present = index

    def use_in_backward(self, index: int, outputs: Sequence[torch.Tensor | None]) -> None:
        """Make a layer whole again as soon as the backward reaches one of its outputs.

        Autograd runs nodes in the reverse order of their making: when a layer's output is reached, no later layer's
        node is left.
        """
        for output in outputs:
            if output is not None and output.requires_grad:
                output.register_hook(lambda _: self.use(index))


def weights_on_use(model: Any) -> WeightsOnUse | None:
    """Return what `keep_on_use` left on a causal language model, None if all its weights are whole."""
    return getattr(model, _ATTRIBUTE, None)


def keep_on_use(model: Any, layers: Sequence[Sequence[LayerWeights]]) -> None:
    """Note on a causal language model that its decoder layers must be used through these."""
    setattr(model, _ATTRIBUTE, WeightsOnUse(layers))


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Return the decoder layers of a causal language model or of the text part of a multimodal one."""
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    return text.layers[: text.config.num_hidden_layers]


def frozen_matrices(layer: nn.Module, *, dtype: torch.dtype, quantised: bool) -> dict[str, nn.Parameter]:
    """Return the parameters of a decoder layer that can be whole on use, by name within the layer.

    Args:
        layer: the decoder layer, which PEFT may have wrapped.
        dtype: the model's; parameters of another one stay whole.
        quantised: leave out what is not to be quantised: routers, indexers and convolutions.
    """
    found = {}
    for name, parameter in layer.named_parameters():
        if parameter.dim() < 2 or parameter.dtype != dtype or "lora_" in name:
            continue
        chooses = bool(_CHOOSING & set(name.split(".")))
        if quantised and not is_expert_parameter(name) and (parameter.dim() != 2 or chooses):
            continue
        found[name] = parameter
    return found


def share_loaded_layers(model: Any, group: RankGroup, *, experts_divided: bool) -> None:
    """Keep a share of every layer of a model that is whole in memory, and give the rest back.

    Args:
        experts_divided: routed experts are divided over ranks already and stay whole.
    """
    layers = []
    for layer in decoder_layers(model):
        matrices = frozen_matrices(layer, dtype=model.get_input_embeddings().weight.dtype, quantised=False)
        parameters = [
            parameter for name, parameter in matrices.items() if not (experts_divided and is_expert_parameter(name))
        ]
        layout = FlatLayout.of([tuple(parameter.shape) for parameter in parameters], group.size)
        share = share_of(
            layout,
            group.rank,
            lambda matrix, first, out, parameters=parameters: out.copy_(
                parameters[matrix].detach().reshape(-1)[first : first + out.numel()]
            ),
            like=parameters[0],
        )
        layers.append([LayerWeights(parameters, layout, PlainShare(share), group)])
    keep_on_use(model, layers)


def share_of(
    layout: FlatLayout, rank: int, fill: Callable[[int, int, torch.Tensor], object], *, like: torch.Tensor
) -> torch.Tensor:
    """Return a rank's share, flat, of which `fill(matrix, first element, out)` writes the parts."""
    share = torch.zeros(layout.share, dtype=like.dtype, device=like.device)
    for part in layout.parts(rank):
        fill(part.matrix, part.first, share[part.place : part.place + part.count])
    return share

"""The structural witness: proof that replaying a response left every block of the prompt state untouched."""

from collections.abc import Sequence
from dataclasses import dataclass

from longstraw_core.resident.layer_state import LayerState
from longstraw_core.spec.errors import IntegrityError


@dataclass(frozen=True)
class BlockWitness:
    """What identifies one block: where its storage is and how often it was written."""

    name: str
    storage_pointer: int
    version: int


@dataclass(frozen=True)
class LayerWitness:
    """Length and blocks of one layer's state."""

    length: int
    blocks: tuple[BlockWitness, ...]


def record(layers: Sequence[LayerState]) -> tuple[LayerWitness, ...]:
    """Record allocation, storage pointers, tensor versions and lengths of all layers."""
    return tuple(
        LayerWitness(
            layer.length,
            tuple(BlockWitness(name, block.data_ptr(), block._version) for name, block in layer.blocks()),
        )
        for layer in layers
    )


def verify(recorded: tuple[LayerWitness, ...], layers: Sequence[LayerState]) -> None:
    """Compare the layers with what was recorded.

    Raises:
        IntegrityError: a block moved, was written, appeared or vanished, or a length changed; names layer and page.
    """
    for index, (before, now) in enumerate(zip(recorded, record(layers), strict=True)):
        if before.length != now.length:
            raise IntegrityError(
                f"prompt state of layer {index}: holds {now.length} tokens, {before.length} were recorded"
            )
        if len(before.blocks) != len(now.blocks):
            raise IntegrityError(
                f"prompt state of layer {index}: has {len(now.blocks)} blocks, {len(before.blocks)} were recorded"
            )
        for old, new in zip(before.blocks, now.blocks, strict=True):
            if old.name != new.name or old.storage_pointer != new.storage_pointer:
                raise IntegrityError(f"prompt state of layer {index}, {old.name}: was moved or replaced during replay")
            if old.version != new.version:
                raise IntegrityError(
                    f"prompt state of layer {index}, {old.name}: was written during replay "
                    f"(version {new.version}, recorded {old.version})"
                )

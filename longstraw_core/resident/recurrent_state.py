"""Recurrent and convolution state of one gated-delta-net layer, with the boundary copies of the reverse sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from longstraw_core.resident.layer_state import Produced
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool, block_bytes
from longstraw_core.resident.reshard import Part, picked_rows
from longstraw_core.spec.errors import IntegrityError


@dataclass(frozen=True)
class RecurrentLayout:
    """Shapes: recurrent state [value heads, key dim, value dim] in fp32, convolution tail [channels, kernel - 1]."""

    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int
    dtype: torch.dtype
    """dtype of the convolution tail, which is the model's."""
    held_heads: tuple[int, ...] | None = None
    """Which value heads and which channels of the layer these are, in order; None for all."""
    held_channels: tuple[int, ...] | None = None

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state, [V, K, D]."""
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def tail_shape(self) -> tuple[int, int]:
        """Shape of the convolution tail, [C, kernel - 1]."""
        return (self.channels, self.kernel - 1)

    @property
    def bytes(self) -> int:
        """Bytes of one copy of the state."""
        return block_bytes(self.recurrent_shape, torch.float32) + block_bytes(self.tail_shape, self.dtype)

    @property
    def sink_bytes(self) -> int:
        """Bytes of the fp32 gradient sinks."""
        return block_bytes(self.recurrent_shape, torch.float32) + block_bytes(self.tail_shape, torch.float32)


@dataclass(frozen=True)
class RecurrentPrefix:
    """The state a segment starts from, read-only, and where to add its gradients (None: nobody asks)."""

    state_VKD: torch.Tensor
    tail_CW: torch.Tensor
    state_sink_VKD: torch.Tensor | None
    tail_sink_CW: torch.Tensor | None


class RecurrentState:
    """The state after the last captured token, and before every captured chunk when boundaries are kept."""

    def __init__(self, pool: ResidentPool, owner: str, layout: RecurrentLayout) -> None:
        self._pool = pool
        self._owner = owner
        self.layout = layout
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens captured."""
        return self._length

    def prefix(self, length: int, *, with_gradient: bool) -> RecurrentPrefix:
        """Return the state after `length` tokens: the latest, a kept boundary, or zeros before the first token.

        The zeros have no gradient sinks: nothing stands behind them.
        """
        if length == 0:
            device = self._pool.device
            return RecurrentPrefix(
                torch.zeros(self.layout.recurrent_shape, dtype=torch.float32, device=device),
                torch.zeros(self.layout.tail_shape, dtype=self.layout.dtype, device=device),
                None,
                None,
            )
        if length not in self._states:
            raise RuntimeError(f"no state was kept after {length} tokens")
        sinks = self._open_sinks() if with_gradient else (None, None)
        return RecurrentPrefix(*self._states[length], *sinks)

    def append(self, produced: Produced, token_count: int, *, keep_boundary: bool) -> None:
        """Store the state after `token_count` more tokens; overwrite the previous one unless it is a boundary."""
        state_VKD, tail_CW = produced
        previous = self._states.get(self._length)
        if previous is None or keep_boundary:
            blocks = (
                self._pool.allocate(self._owner, self.layout.recurrent_shape, torch.float32),
                self._pool.allocate(self._owner, self.layout.tail_shape, self.layout.dtype),
            )
        else:
            blocks = self._states.pop(self._length)
        blocks[0].copy_(state_VKD)
        blocks[1].copy_(tail_CW)
        self._length += token_count
        self._states[self._length] = blocks

    def open_sinks(self) -> None:
        """Allocate the zeroed fp32 sinks, one pair for whichever state is being read."""
        if self._sinks is not None:
            raise RuntimeError("gradient sinks are already open")
        owner = f"{self._owner}/gradients"
        self._sinks = (
            self._pool.allocate(owner, self.layout.recurrent_shape, torch.float32),
            self._pool.allocate(owner, self.layout.tail_shape, torch.float32),
        )

    def close_sinks(self) -> None:
        """Return the sinks to the pool."""
        if self._sinks is not None:
            self._pool.release(f"{self._owner}/gradients")
        self._sinks = None

    def take_gradients(self, start: int, end: int) -> Produced:
        """Return the gradients (state, tail) after token `end` and zero the sinks for the state before `start`."""
        del start, end
        sinks = self._open_sinks()
        taken = (sinks[0].clone(), sinks[1].clone())
        for sink in sinks:
            sink.zero_()
        return taken

    def _open_sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sinks is None:
            raise RuntimeError("gradient sinks are not open")
        return self._sinks

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every state as `recurrent state after N tokens` and `convolution tail after N tokens`."""
        for length, (state_VKD, tail_CW) in self._states.items():
            yield f"recurrent state after {length} tokens", state_VKD
            yield f"convolution tail after {length} tokens", tail_CW

    def export(self) -> dict[str, torch.Tensor]:
        """Return every kept state as `recurrent.N` and `convolution.N`, N being the tokens before it.

        A part of the heads comes with `held_heads` and `held_channels`.
        """
        exported = {}
        if self.layout.held_heads is not None and self.layout.held_channels is not None:
            exported["held_heads"] = torch.tensor(self.layout.held_heads, dtype=torch.int64)
            exported["held_channels"] = torch.tensor(self.layout.held_channels, dtype=torch.int64)
        for length, (state_VKD, tail_CW) in self._states.items():
            exported[f"recurrent.{length:09d}"] = state_VKD
            exported[f"convolution.{length:09d}"] = tail_CW
        return exported

    def reshard(
        self, parts: Sequence[Part], stored: Sequence[PromptOwnership], wanted: PromptOwnership
    ) -> dict[str, torch.Tensor]:
        """Return the states of the heads this rank holds from those of all heads."""
        del stored, wanted  # every rank has seen all tokens
        kinds = (
            ("recurrent", "held_heads", self.layout.held_heads, self.layout.value_heads),
            ("convolution", "held_channels", self.layout.held_channels, self.layout.channels),
        )
        picked: dict[str, torch.Tensor] = {}
        for kind, held, mine, count in kinds:
            wanted_K = torch.arange(count) if mine is None else torch.tensor(mine)
            if mine is not None:
                picked[held] = wanted_K
            for name in sorted(parts[0]):
                if name.split(".")[0] == kind:
                    keys = [part[held] if held in part else torch.arange(part[name].shape[0]) for part in parts]
                    found = picked_rows([part[name] for part in parts], keys, wanted_K)
                    if found is not None:
                        picked[name] = found
        return picked

    def restore(self, tensors: dict[str, torch.Tensor], ownership: PromptOwnership) -> None:
        """Fill the states from exported ones.

        Raises:
            IntegrityError: a tensor is missing, unexpected, or has another shape or dtype.
        """
        token_count = ownership.tokens
        tensors = self._without_held(tensors)
        lengths = sorted({int(name.split(".")[1]) for name in tensors})
        names = {f"{kind}.{length:09d}" for length in lengths for kind in ("recurrent", "convolution")}
        if names != set(tensors) or (lengths[-1] if lengths else 0) != token_count:
            raise IntegrityError(f"{self._owner}: stored states {sorted(tensors)} do not end at token {token_count}")
        for length in lengths:
            stored = (tensors[f"recurrent.{length:09d}"], tensors[f"convolution.{length:09d}"])
            expected = ((self.layout.recurrent_shape, torch.float32), (self.layout.tail_shape, self.layout.dtype))
            for tensor, (shape, dtype) in zip(stored, expected, strict=True):
                if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                    raise IntegrityError(
                        f"{self._owner} state after {length} tokens: stored as {tuple(tensor.shape)} {tensor.dtype}, "
                        f"expected {shape} {dtype}"
                    )
            self._length = max(self._length, length)
            blocks = (
                self._pool.allocate(self._owner, self.layout.recurrent_shape, torch.float32),
                self._pool.allocate(self._owner, self.layout.tail_shape, self.layout.dtype),
            )
            for block, tensor in zip(blocks, stored, strict=True):
                block.copy_(tensor)
            self._states[length] = blocks

    def _without_held(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Check that the stored heads are those this rank holds, and leave their names out."""
        for name, mine in (("held_heads", self.layout.held_heads), ("held_channels", self.layout.held_channels)):
            stored = None if name not in tensors else tuple(int(item) for item in tensors[name])
            if tensors and stored != mine:
                raise IntegrityError(f"{self._owner}: {name} is {stored}, this rank holds {mine}")
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("held_")}

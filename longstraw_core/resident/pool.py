"""The pool that owns the memory of resident state: blocks are handed out to a named owner and returned by it."""

from collections import defaultdict

import torch

from longstraw_core.resident.free_memory import free_memory_bytes
from longstraw_core.spec.errors import SpecError

BlockShape = tuple[tuple[int, ...], torch.dtype]

SLAB_BYTES = 64 << 20
"""Host memory is taken in slabs of this size: above malloc's largest mmap threshold (32 MiB), so that long-lived blocks
never lie between freed temporaries and keep the heap from shrinking. Untouched parts of a slab cost no memory."""
_ALIGNMENT = 64


def block_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size in bytes of one block of `shape` and `dtype`."""
    elements = 1
    for extent in shape:
        elements *= extent
    return elements * dtype.itemsize


class ResidentPool:
    """Hands out fixed-size blocks (each its own storage) up to a capacity that is known beforehand.

    A block is one tensor with its own storage and version counter, so that a witness can tell exactly which one
    was written. Returned blocks are kept and handed out again for the same shape and dtype. With `pinned`, the
    blocks are page-locked host memory that a device can copy from while it computes.
    """

    def __init__(self, device: torch.device, capacity_bytes: int | None = None, *, pinned: bool = False) -> None:
        self.device = device
        self._pinned = pinned
        self.capacity_bytes = free_memory_bytes(device) if capacity_bytes is None else capacity_bytes
        self._owned: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._returned: dict[BlockShape, list[torch.Tensor]] = defaultdict(list)
        self._used_bytes = 0
        self._slab: torch.UntypedStorage | None = None
        self._slab_used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes in the hands of owners."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be handed out."""
        return self.capacity_bytes - self._used_bytes

    def require(self, asked_bytes: int, purpose: str) -> None:
        """Check, before anything is allocated, that `asked_bytes` can be handed out.

        Raises:
            SpecError: more is asked than is free; the message says both.
        """
        if asked_bytes > self.free_bytes:
            raise SpecError(
                f"{purpose} needs {asked_bytes:,} bytes of resident state, {self.free_bytes:,} of "
                f"{self.capacity_bytes:,} are free: shorten the prompt, release other prompts or raise the capacity"
            )

    def allocate(self, owner: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Hand one zeroed block to `owner`.

        Raises:
            SpecError: the pool is exhausted.
        """
        size = block_bytes(shape, dtype)
        self.require(size, owner)
        reusable = self._returned[shape, dtype]
        if reusable:
            block = reusable.pop()
            block.zero_()
        else:
            self._drop_returned(size)
            block = self._new_block(shape, dtype)
        self._owned[owner].append(block)
        self._used_bytes += size
        return block

    def _new_block(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed block with a version counter of its own; on a host its bytes lie in a shared slab."""
        size = block_bytes(shape, dtype)
        if self.device.type != "cpu" or self._pinned or size > SLAB_BYTES:
            return torch.zeros(shape, dtype=dtype, device=self.device, pin_memory=self._pinned)
        offset = -(-self._slab_used // _ALIGNMENT) * _ALIGNMENT
        if self._slab is None or offset + size > SLAB_BYTES:
            self._slab, offset = torch.empty(SLAB_BYTES, dtype=torch.uint8).untyped_storage(), 0
        self._slab_used = offset + size
        # `set_`, unlike a view, gives each block its own version counter, which the witness reads
        block = torch.empty(0, dtype=dtype)
        block.set_(self._slab, offset // dtype.itemsize, shape)  # type: ignore[call-overload]  # missing in the stubs
        return block.zero_()

    def release(self, owner: str) -> None:
        """Take back every block of `owner`; an owner without blocks is a programming error."""
        for block in self._owned.pop(owner):
            self._returned[tuple(block.shape), block.dtype].append(block)
            self._used_bytes -= block.numel() * block.element_size()

    def owns(self, owner: str) -> bool:
        """Whether `owner` holds blocks."""
        return owner in self._owned

    def _drop_returned(self, needed_bytes: int) -> None:
        """Give returned blocks of other shapes back to the system when they stand in the way of the capacity."""
        held = sum(block_bytes(*shape) * len(blocks) for shape, blocks in self._returned.items())
        if self._used_bytes + held + needed_bytes > self.capacity_bytes:
            self._returned.clear()

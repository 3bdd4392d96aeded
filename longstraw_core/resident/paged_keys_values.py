"""Key and value pages of one full-attention layer, with their gradient sinks; never concatenated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from longstraw_core.resident.layer_state import Produced
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool, block_bytes
from longstraw_core.resident.reshard import Part, joined_pages, picked_rows, split_pages
from longstraw_core.spec.errors import IntegrityError


@dataclass(frozen=True)
class PageLayout:
    """Shape of a page: keys and values of `page_tokens` tokens, heads first ([2, heads, tokens, head dim])."""

    page_tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the page's block, [2, K, T, D]."""
        return (2, self.heads, self.page_tokens, self.head_dim)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.page_tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the pages for `tokens` tokens."""
        return self.pages_for(tokens) * block_bytes(self.shape, self.dtype)

    def sink_bytes_for(self, tokens: int) -> int:
        """Bytes of the fp32 gradient sinks for `tokens` tokens."""
        return self.pages_for(tokens) * block_bytes(self.shape, torch.float32)


@dataclass(frozen=True)
class PrefixTile:
    """Keys and values of up to one page, and where to add their gradients (None: nobody asks)."""

    k_KTD: torch.Tensor
    v_KTD: torch.Tensor
    k_sink_KTD: torch.Tensor | None
    v_sink_KTD: torch.Tensor | None


@dataclass(frozen=True)
class PagedPrefix:
    """The first `length` tokens of a layer's pages, read-only; a mixer walks it tile by tile."""

    pages: tuple[torch.Tensor, ...]
    sinks: tuple[torch.Tensor, ...] | None
    page_tokens: int
    length: int

    def tiles(self) -> Iterator[PrefixTile]:
        """Yield the tiles in token order."""
        for index in range(-(-self.length // self.page_tokens)):
            filled = min(self.page_tokens, self.length - index * self.page_tokens)
            k_KTD, v_KTD = self.pages[index][:, :, :filled]
            if self.sinks is None:
                yield PrefixTile(k_KTD, v_KTD, None, None)
            else:
                k_sink_KTD, v_sink_KTD = self.sinks[index][:, :, :filled]
                yield PrefixTile(k_KTD, v_KTD, k_sink_KTD, v_sink_KTD)


class PagedKeysValues:
    """The growing pages of one layer. Keys are stored after normalisation and rotation, as attention reads them."""

    def __init__(self, pool: ResidentPool, owner: str, layout: PageLayout) -> None:
        self._pool = pool
        self._owner = owner
        self.layout = layout
        self._pages: list[torch.Tensor] = []
        self._sinks: list[torch.Tensor] | None = None
        self._length = 0

    @property
    def length(self) -> int:
        """Rows stored: the owned tokens of what was captured."""
        return self._length

    def prefix(self, length: int, *, with_gradient: bool) -> PagedPrefix:
        """Return the first `length` tokens, with the gradient sinks when the reader back-propagates into them."""
        if length > self._length:
            raise RuntimeError(f"{length} tokens asked of {self._length}")
        sinks = tuple(self._open_sinks()) if with_gradient else None
        return PagedPrefix(tuple(self._pages), sinks, self.layout.page_tokens, length)

    def append(self, produced: Produced, token_count: int, *, keep_boundary: bool) -> None:
        """Copy the keys and values [T, K, D] of owned tokens behind the stored ones. Pages need no boundary copies."""
        del token_count, keep_boundary
        k_TKD, v_TKD = produced
        done, rows = 0, k_TKD.shape[0]
        while done < rows:
            offset = self._length % self.layout.page_tokens
            if offset == 0:
                self._pages.append(self._pool.allocate(self._owner, self.layout.shape, self.layout.dtype))
            count = min(rows - done, self.layout.page_tokens - offset)
            page_2KTD = self._pages[-1]
            page_2KTD[0, :, offset : offset + count] = k_TKD[done : done + count].transpose(0, 1)
            page_2KTD[1, :, offset : offset + count] = v_TKD[done : done + count].transpose(0, 1)
            done += count
            self._length += count

    def open_sinks(self) -> None:
        """Allocate one zeroed fp32 sink per page."""
        if self._sinks is not None:
            raise RuntimeError("gradient sinks are already open")
        self._sinks = [
            self._pool.allocate(f"{self._owner}/gradients", self.layout.shape, torch.float32) for _ in self._pages
        ]

    def close_sinks(self) -> None:
        """Return the sinks to the pool."""
        if self._sinks:
            self._pool.release(f"{self._owner}/gradients")
        self._sinks = None

    def take_gradients(self, start: int, end: int) -> Produced:
        """Return fp32 gradients (dk, dv) of tokens [start, end), each [end - start, K, D]."""
        sinks = self._open_sinks()
        shape = (end - start, self.layout.heads, self.layout.head_dim)
        dk_TKD, dv_TKD = (torch.empty(shape, dtype=torch.float32, device=self._pool.device) for _ in range(2))
        position = start
        while position < end:
            page, offset = divmod(position, self.layout.page_tokens)
            count = min(end - position, self.layout.page_tokens - offset)
            target = slice(position - start, position - start + count)
            dk_TKD[target] = sinks[page][0, :, offset : offset + count].transpose(0, 1)
            dv_TKD[target] = sinks[page][1, :, offset : offset + count].transpose(0, 1)
            position += count
        return dk_TKD, dv_TKD

    def _open_sinks(self) -> list[torch.Tensor]:
        if self._sinks is None:
            raise RuntimeError("gradient sinks are not open")
        return self._sinks

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every page as `page N`."""
        for index, page_2KTD in enumerate(self._pages):
            yield f"page {index}", page_2KTD

    def export(self) -> dict[str, torch.Tensor]:
        """Return the filled part of every page as `page.NNNNNN` [2, K, filled, D]."""
        exported = {}
        for index, page_2KTD in enumerate(self._pages):
            filled = min(self.layout.page_tokens, self._length - index * self.layout.page_tokens)
            exported[f"page.{index:06d}"] = page_2KTD[:, :, :filled].contiguous()
        return exported

    def reshard(
        self, parts: Sequence[Part], stored: Sequence[PromptOwnership], wanted: PromptOwnership
    ) -> dict[str, torch.Tensor]:
        """Return the pages of the wanted tokens from those of all stored ones."""
        rows = picked_rows(
            [joined_pages(part, "page", 2) for part in parts],
            [ownership.positions() for ownership in stored],
            wanted.positions(),
            dim=2,
        )
        return {} if rows is None else split_pages(rows, "page", 2, self.layout.page_tokens)

    def restore(self, tensors: dict[str, torch.Tensor], ownership: PromptOwnership) -> None:
        """Fill the pages from exported ones.

        Raises:
            IntegrityError: a page is missing, unexpected, or has another shape or dtype.
        """
        token_count = ownership.rows()
        expected = {f"page.{index:06d}" for index in range(self.layout.pages_for(token_count))}
        if set(tensors) != expected:
            raise IntegrityError(f"{self._owner}: pages {sorted(set(tensors) ^ expected)} are missing or unexpected")
        for index, name in enumerate(sorted(expected)):
            filled = min(self.layout.page_tokens, token_count - index * self.layout.page_tokens)
            shape = (2, self.layout.heads, filled, self.layout.head_dim)
            stored = tensors[name]
            if tuple(stored.shape) != shape or stored.dtype != self.layout.dtype:
                raise IntegrityError(
                    f"{self._owner} {name}: stored as {tuple(stored.shape)} {stored.dtype}, "
                    f"expected {shape} {self.layout.dtype}"
                )
            page_2KTD = self._pool.allocate(self._owner, self.layout.shape, self.layout.dtype)
            page_2KTD[:, :, :filled] = stored
            self._pages.append(page_2KTD)
        self._length = token_count

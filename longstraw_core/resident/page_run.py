"""Adjacent pages for rows that are gathered by position: one allocation, one witness per page. Knows no model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longstraw_core.resident.pool import ResidentPool, block_bytes


@dataclass(frozen=True)
class RowLayout:
    """Shape of a page: `page_tokens` rows of `width` values, one row per token."""

    page_tokens: int
    width: int
    dtype: torch.dtype

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.page_tokens)

    def shape_for(self, tokens: int) -> tuple[int, int, int]:
        """Shape of the run of pages for `tokens` tokens, [pages, page tokens, width]."""
        return (self.pages_for(tokens), self.page_tokens, self.width)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the pages for `tokens` tokens."""
        return block_bytes(self.shape_for(tokens), self.dtype)

    def sink_bytes_for(self, tokens: int) -> int:
        """Bytes of fp32 gradient sinks for `tokens` tokens."""
        return block_bytes(self.shape_for(tokens), torch.float32)


class PageRun:
    """The pages of one prompt in one layer, adjacent in memory, so that any selection of rows is one gather.

    The number of tokens is known when the run is allocated: it never grows and is never concatenated. Rows are
    written through the pages, each of which has its own version counter; readers use `rows`, whose version counter is
    another one, so that a write through it is noticed too.
    """

    def __init__(self, pool: ResidentPool, owner: str, layout: RowLayout, tokens: int) -> None:
        self._layout = layout
        self._whole = pool.allocate(owner, layout.shape_for(tokens), layout.dtype)
        # `.data` has a version counter of its own; a view of it shares that one
        self._pages = [self._whole.data[index] for index in range(layout.pages_for(tokens))]

    def rows(self, length: int) -> torch.Tensor:
        """Return the first `length` rows, [length, width], without a copy."""
        return self._whole.view(-1, self._layout.width)[:length]

    def write(self, start: int, rows_TD: torch.Tensor) -> None:
        """Copy rows to positions [start, start + T)."""
        done, count = 0, rows_TD.shape[0]
        while done < count:
            page, offset = divmod(start + done, self._layout.page_tokens)
            taken = min(count - done, self._layout.page_tokens - offset)
            self._pages[page][offset : offset + taken] = rows_TD[done : done + taken]
            done += taken

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every page as `page N`, then the run as `the run of pages`."""
        for index, page_TD in enumerate(self._pages):
            yield f"page {index}", page_TD
        if self._pages:
            yield "the run of pages", self._whole

    def filled(self, index: int, length: int) -> torch.Tensor:
        """Return the filled part of a page when `length` rows are written."""
        return self._pages[index][: min(self._layout.page_tokens, length - index * self._layout.page_tokens)]

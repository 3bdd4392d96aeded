"""Rows and pages of a stored state from one number of ranks to another. Pure tensor work; knows no layer kind."""

from collections.abc import Mapping, Sequence

import torch

Part = Mapping[str, torch.Tensor]
"""What one rank stored of one layer, by name."""


def joined_pages(part: Part, kind: str, dim: int) -> torch.Tensor | None:
    """Return the rows of all pages called `<kind>.NNNNNN`, in order, or None when there are none."""
    pages = [part[name] for name in sorted(part) if name.split(".")[0] == kind]
    return torch.cat(pages, dim) if pages else None


def split_pages(rows: torch.Tensor, kind: str, dim: int, page_tokens: int) -> dict[str, torch.Tensor]:
    """Return rows as pages called `<kind>.NNNNNN` of at most `page_tokens` rows."""
    count = -(-rows.shape[dim] // page_tokens)
    pages = rows.split(page_tokens, dim) if count else ()
    return {f"{kind}.{index:06d}": page.contiguous() for index, page in enumerate(pages)}


def picked_rows(
    rows: Sequence[torch.Tensor | None], keys: Sequence[torch.Tensor], wanted: torch.Tensor, dim: int = 0
) -> torch.Tensor | None:
    """Return the rows with the keys `wanted`, whichever part holds them.

    Args:
        rows: per part, rows along `dim`; None for a part without rows.
        keys: per part, what its rows are: token positions, heads or channels, int64. Parts may hold the same key.
        wanted: keys of the result, in its order; each must be held by a part.
        dim: dimension of the rows.
    """
    held = [(row, key) for row, key in zip(rows, keys, strict=True) if row is not None]
    if not held:
        return None
    key_K = torch.cat([key[: row.shape[dim]] for row, key in held])
    every = torch.cat([row for row, _ in held], dim)
    order_K = key_K.argsort()
    place_W = torch.searchsorted(key_K[order_K], wanted)
    return every.index_select(dim, order_K[place_W]).contiguous()

"""Which tokens a rank owns: every run of tokens that is fed together is dealt evenly, in order. Pure arithmetic.

Rule: n tokens over N ranks are split into N consecutive runs; the first n mod N ranks own one token more than the
others. A prompt is dealt chunk by chunk, so that every rank holds an even share of every prefix; a rank's resident rows
are its shares of the chunks, in order. A response is dealt in the same way. A rank may own no token.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def owned_counts(tokens: int, ranks: int) -> tuple[int, ...]:
    """Return how many of `tokens` consecutive tokens every rank owns."""
    share, more = divmod(tokens, ranks)
    return tuple(share + (rank < more) for rank in range(ranks))


def owned_slice(tokens: int, rank: int, ranks: int) -> slice:
    """Return which of `tokens` consecutive tokens `rank` owns."""
    counts = owned_counts(tokens, ranks)
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


@dataclass(frozen=True)
class PromptOwnership:
    """How the captured tokens of one prompt are dealt, chunk by chunk."""

    chunk_starts: tuple[int, ...]
    """First token of every chunk, ascending from 0; empty when nothing is captured."""
    tokens: int
    """Captured tokens, of all ranks."""
    rank: int = 0
    ranks: int = 1

    @classmethod
    def chunked(cls, tokens: int, chunk_tokens: int, *, rank: int = 0, ranks: int = 1) -> "PromptOwnership":
        """Return the ownership of a prompt that is captured in chunks of `chunk_tokens`."""
        return cls(tuple(range(0, tokens, chunk_tokens)), tokens, rank, ranks)

    @classmethod
    def whole(cls, tokens: int) -> "PromptOwnership":
        """Return the ownership of a prompt of which one rank owns everything."""
        return cls((0,) if tokens else (), tokens)

    def rows(self, end: int | None = None) -> int:
        """Return how many of the first `end` tokens (all by default) this rank owns: its rows in page order."""
        return self.rows_per_rank(end)[self.rank]

    def rows_per_rank(self, end: int | None = None) -> tuple[int, ...]:
        """Return how many of the first `end` tokens every rank owns."""
        return tuple(sum(last - first for first, last in self._runs(rank, end)) for rank in range(self.ranks))

    def positions(self, end: int | None = None, *, rank: int | None = None) -> torch.Tensor:
        """Return the absolute positions, int64 and ascending, of a rank's rows (this rank's by default)."""
        runs = self._runs(self.rank if rank is None else rank, end)
        return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*run) for run in runs)])

    def _runs(self, rank: int, end: int | None) -> Sequence[tuple[int, int]]:
        """The rank's runs of tokens [first, last), cut off at `end`."""
        limit = self.tokens if end is None else end
        runs = []
        for start, stop in itertools.pairwise((*self.chunk_starts, self.tokens)):
            if start >= limit:
                break
            owned = owned_slice(stop - start, rank, self.ranks)
            first, last = start + owned.start, min(start + owned.stop, limit)
            if first < last:
                runs.append((first, last))
        return runs

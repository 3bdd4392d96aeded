"""The state of one captured prompt over all layers: life cycle, gradient sinks and witness."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from longstraw_core.resident import files, witness
from longstraw_core.resident.identity import PrefixIdentity
from longstraw_core.resident.layer_state import LayerState, Produced
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.spec.descriptors import TreeEntry

_serial = itertools.count()


class PrefixState:
    """Resident state of the first `prompt_tokens - 1` tokens of a prompt.

    The last prompt token is fed at replay, so that the first response token has a gradient. The state owns its
    blocks until `release` returns them to the pool.
    """

    def __init__(
        self,
        pool: ResidentPool,
        prompt_token_ids: Sequence[int],
        make_layers: Callable[[ResidentPool, str], list[LayerState]],
        ownership: PromptOwnership | None = None,
    ) -> None:
        self.prompt_token_ids = tuple(int(token) for token in prompt_token_ids)
        self.ownership = ownership or PromptOwnership.whole(len(self.prompt_token_ids) - 1)
        """How the captured tokens are dealt to the ranks; this object holds one rank's part."""
        self._pool = pool
        self._owner = f"prompt {next(_serial)}"
        self.layers = make_layers(pool, self._owner)
        self.chunk_starts: list[int] = []
        """First token of every captured chunk, in order."""
        self._witness: tuple[witness.LayerWitness, ...] | None = None
        self._sinks_open = False
        self._released = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.prompt_token_ids)

    @property
    def captured_tokens(self) -> int:
        """Tokens in the state once it is complete: all but the last."""
        return len(self.prompt_token_ids) - 1

    @property
    def sinks_open(self) -> bool:
        """Whether gradients of this state are being accumulated."""
        return self._sinks_open

    def append(self, layer: int, produced: Produced, token_count: int, *, keep_boundary: bool) -> None:
        """Append what one chunk produced in one layer (`produced` detached from autograd)."""
        self.layers[layer].append(produced, token_count, keep_boundary=keep_boundary)

    def open_sinks(self) -> None:
        """Allocate the zeroed gradient sinks of all layers; call `PrefixState.close_sinks` or `release` after use."""
        for layer in self.layers:
            layer.open_sinks()
        self._sinks_open = True

    def close_sinks(self) -> None:
        """Return the gradient sinks of all layers."""
        for layer in self.layers:
            layer.close_sinks()
        self._sinks_open = False

    def record_witness(self) -> None:
        """Record the structure of every block; do this once, before the first replay."""
        self._witness = witness.record(self.layers)

    def verify_witness(self) -> None:
        """Check every block against the record; do this after every response.

        Raises:
            IntegrityError: names the layer and the page that changed.
        """
        if self._witness is None:
            raise RuntimeError("no witness was recorded")
        witness.verify(self._witness, self.layers)

    def release(self) -> None:
        """Return every block to the pool; the state cannot be used any more. Releasing twice is allowed."""
        if self._released:
            return
        self.close_sinks()
        for owner in [f"{self._owner}/layer {index}" for index in range(len(self.layers))]:
            if self._pool.owns(owner):
                self._pool.release(owner)
        self.layers = []
        self._witness = None
        self._released = True

    def save(self, directory: Path, identity: PrefixIdentity) -> None:
        """Write the state as safetensors shards and a canonical JSON manifest into an empty or new directory."""
        files.save(directory, identity, self.prompt_token_ids, self.chunk_starts, self.layers)

    def save_shards(self, directory: Path) -> tuple[TreeEntry, ...]:
        """Write this rank's shards and describe them; the manifest is written once all ranks have."""
        return files.save_shards(directory, self.layers, rank=self.ownership.rank, ranks=self.ownership.ranks)

    def restore(self, directory: Path, expected: PrefixIdentity) -> None:
        """Fill this empty state from files.

        Raises:
            IntegrityError: the files belong to another identity, or differ from what their manifest says.
        """
        self.chunk_starts = files.restore(directory, expected, self.prompt_token_ids, self.ownership, self.layers)

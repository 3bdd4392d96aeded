"""Latent pages, index-key pages and recorded choices of one MLA layer, in host memory. Knows no model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from longstraw_core.resident.layer_state import Produced
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.page_run import PageRun, RowLayout
from longstraw_core.resident.pool import ResidentPool, block_bytes
from longstraw_core.resident.reshard import Part, joined_pages, picked_rows, split_pages
from longstraw_core.resident.staging import Key, Stager
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.transaction import SelectionRecord

WIDE_POSITIONS = 1 << 16
"""Prompts up to this length record positions in 16 bits, longer ones in 32."""


@dataclass(frozen=True)
class ChoiceLayout:
    """What the layer decides per token: which tokens it attends to and which experts it asks; 0 means no decision."""

    selected: int
    """Tokens that an index layer selects; the first `selected` tokens attend to all, so nothing is recorded."""
    experts: int
    """Experts a token is routed to."""
    expert_count: int
    selection_record: SelectionRecord = "cut"
    """What is kept of a selection: where it is cut (8 bytes), or its positions."""

    def shapes_for(self, ownership: PromptOwnership) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of every record of the owned tokens; a record may have no rows on this rank."""
        shapes = {}
        rows = ownership.rows()
        if self.selected and ownership.tokens > self.selected:
            selecting = rows - ownership.rows(self.selected)
            if self.selection_record == "positions":
                narrow = ownership.tokens <= WIDE_POSITIONS
                shapes["selection"] = ((selecting, self.selected), torch.uint16 if narrow else torch.int32)
            else:
                shapes["cut_scores"] = ((selecting, 1), torch.float32)
                shapes["cut_positions"] = ((selecting, 1), torch.int32)
        if self.experts and ownership.tokens:
            shapes["experts"] = ((rows, self.experts), torch.uint8 if self.expert_count <= 256 else torch.int32)
        return shapes

    def bytes_for(self, ownership: PromptOwnership) -> int:
        """Bytes of the records of the owned tokens."""
        return sum(block_bytes(shape, dtype) for shape, dtype in self.shapes_for(ownership).values())


@dataclass(frozen=True)
class LatentLayout:
    """Pages of one layer: latent and rope key side by side, index keys where the layer has an indexer."""

    latents: RowLayout
    index_keys: RowLayout | None
    choices: ChoiceLayout


class LatentState:
    """Resident state of one layer for a prompt whose ownership is known beforehand. Rows are owned tokens, in order.

    `following` and `preceding` are the states of the same prompt that are read next in forward and backward order;
    reading this state starts to bring the neighbour's rows to the device.
    """

    def __init__(
        self, pool: ResidentPool, owner: str, layout: LatentLayout, ownership: PromptOwnership, stager: Stager
    ) -> None:
        self._pool = pool
        self._owner = owner
        self._ownership = ownership
        self._rows_in_all = ownership.rows()
        self._shapes = layout.choices.shapes_for(ownership)
        self._first_selecting = ownership.rows(layout.choices.selected)
        self._stager = stager
        self.layout = layout
        self.following: LatentState | None = None
        self.preceding: LatentState | None = None
        self._latents: PageRun | None = None
        self._index_keys: PageRun | None = None
        self._sink: torch.Tensor | None = None
        self._choices: dict[str, torch.Tensor] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """Rows stored."""
        return self._length

    @property
    def name(self) -> str:
        """Prompt and layer, for messages."""
        return self._owner

    # Reading

    def latents(self, length: int, *, backward: bool) -> torch.Tensor:
        """Return the first `length` rows (latent, rope key) on the computing device, [length, D]."""
        rows_TD = self._stager.take(self._key("latents", length), self._rows("latents", length))
        neighbour = self.preceding if backward else self.following
        if neighbour is not None and length:
            self._stager.prefetch(neighbour._rows_to_bring(length, backward=backward))
        return rows_TD

    def index_keys(self, length: int) -> torch.Tensor:
        """Return the first `length` index keys on the computing device, [length, I]."""
        return self._stager.take(self._key("index keys", length), self._rows("index keys", length))

    def gradient_sink(self, length: int) -> AbstractContextManager[torch.Tensor]:
        """Give the fp32 sink of the first `length` rows, [length, D], for adding to it."""
        if self._sink is None:
            raise RuntimeError("gradient sinks are not open")
        return self._stager.accumulate(self._sink.view(-1, self.layout.latents.width)[:length])

    def _rows_to_bring(self, length: int, *, backward: bool) -> dict[Key, torch.Tensor]:
        names = ["latents"] if backward or self.layout.index_keys is None else ["latents", "index keys"]
        return {self._key(name, length): self._rows(name, length) for name in names}

    def _key(self, name: str, length: int) -> Key:
        return (self._owner, name, length)

    def _rows(self, name: str, length: int) -> torch.Tensor:
        if length > self._length:
            raise RuntimeError(f"{length} tokens asked of {self._length}")
        run = self._latents if name == "latents" else self._index_keys
        layout = self.layout.latents if name == "latents" else self.layout.index_keys
        if layout is None:
            raise RuntimeError("this layer has no indexer")
        if run is None:
            return torch.empty((0, layout.width), dtype=layout.dtype, device=self._pool.device)
        return run.rows(length)

    # Choices

    def records(self, name: str) -> bool:
        """Whether `name` is among the choices that the layer records for its prompt."""
        return name in self._shapes

    def record_choice(self, name: str, start: int, choice_TK: torch.Tensor) -> None:
        """Keep one kind of choice of rows [start, start + T) for the reverse sweep, if it is among the recorded.

        Args:
            name: `selection`, `cut_scores`, `cut_positions` or `experts`.
            start: first row.
            choice_TK: one choice per row.
        """
        first = self._first_recorded(name)
        shapes = self._shapes
        if name not in shapes or start + choice_TK.shape[0] <= first:
            return
        if name not in self._choices:
            shape, dtype = shapes[name]
            self._choices[name] = self._pool.allocate(self._owner, shape, dtype)
        skipped = max(first - start, 0)
        begin = max(start - first, 0)
        rows_TK = choice_TK[skipped:]
        self._choices[name][begin : begin + rows_TK.shape[0]] = rows_TK.to(
            device=self._pool.device, dtype=self._choices[name].dtype
        )

    def recorded_choice(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return what was recorded for rows [start, end) on the computing device; integers as int64.

        Of a selection this is one line per token that had to select: none for the prompt's first `selected` ones.

        Raises:
            IntegrityError: the choices were not recorded at capture.
        """
        first = self._first_recorded(name)
        shapes = self._shapes
        if name in shapes and name not in self._choices and end > first:
            raise IntegrityError(f"{self._owner}: the {name} of the prompt's tokens was not recorded at capture")
        width, dtype = (shapes[name][0][1], shapes[name][1]) if name in shapes else (1, torch.float32)
        wanted = dtype if dtype.is_floating_point else torch.int64
        if end <= first:
            return torch.empty((0, width), dtype=wanted, device=self._stager.device)
        recorded = self._choices[name][max(start - first, 0) : end - first]
        return recorded.to(device=self._stager.device, dtype=wanted)

    def _first_recorded(self, name: str) -> int:
        return 0 if name == "experts" else self._first_selecting

    # Life cycle

    def append(self, produced: Produced, token_count: int, *, keep_boundary: bool) -> None:
        """Write rows (latent, rope key) [T, D], and index keys [T, I] if the layer has any, behind the stored ones."""
        del token_count, keep_boundary  # pages hold owned tokens only and need no boundary copies
        rows = produced[0].shape[0]
        if self._length + rows > self._rows_in_all:
            self._refuse_overflow(rows)
        self._allocate()
        for (_, run, _), rows_TD in zip(self._runs(), produced, strict=True):
            run.write(self._length, rows_TD)
        self._length += rows

    def _refuse_overflow(self, rows: int) -> None:
        raise RuntimeError(f"{self._length + rows} tokens do not fit pages for {self._rows_in_all}")

    def _allocate(self) -> None:
        if self._latents is not None:
            return
        self._latents = PageRun(self._pool, self._owner, self.layout.latents, self._rows_in_all)
        if self.layout.index_keys is not None:
            self._index_keys = PageRun(self._pool, self._owner, self.layout.index_keys, self._rows_in_all)

    def open_sinks(self) -> None:
        """Allocate the zeroed fp32 sink of the latent pages; index keys have no gradient."""
        if self._sink is not None:
            raise RuntimeError("gradient sinks are already open")
        owner = f"{self._owner}/gradients"
        self._sink = self._pool.allocate(owner, self.layout.latents.shape_for(self._length), torch.float32)

    def close_sinks(self) -> None:
        """Return the sink to the pool."""
        if self._sink is not None:
            self._pool.release(f"{self._owner}/gradients")
        self._sink = None

    def take_gradients(self, start: int, end: int) -> Produced:
        """Return the fp32 gradient of rows [start, end), [T, D]; index keys have none."""
        if self._sink is None:
            raise RuntimeError("gradient sinks are not open")
        rows_TD = self._sink.view(-1, self.layout.latents.width)[start:end].to(self._stager.device, copy=True)
        return (rows_TD,) if self.layout.index_keys is None else (rows_TD, rows_TD.new_empty(0))

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield latent pages, index-key pages and recorded choices."""
        for kind, run in (("latent", self._latents), ("index-key", self._index_keys)):
            for name, block in run.blocks() if run is not None else ():
                yield f"{kind} {name}", block
        for name, block in self._choices.items():
            yield f"recorded {name}", block

    # Files

    def export(self) -> dict[str, torch.Tensor]:
        """Return `latents.NNNNNN` and `index_keys.NNNNNN`, page by page and filled part only, and the choices."""
        exported = dict(self._choices)
        for name, run, layout in self._runs():
            for page in range(layout.pages_for(self._length)):
                exported[f"{name}.{page:06d}"] = run.filled(page, self._length).contiguous()
        return exported

    def reshard(
        self, parts: Sequence[Part], stored: Sequence[PromptOwnership], wanted: PromptOwnership
    ) -> dict[str, torch.Tensor]:
        """Return pages and choices of the wanted tokens from those of all stored ones."""
        picked: dict[str, torch.Tensor] = {}
        for name, layout in self._row_layouts():
            pages = [joined_pages(part, name, 0) for part in parts]
            rows = picked_rows(pages, [owned.positions() for owned in stored], wanted.positions())
            picked |= {} if rows is None else split_pages(rows, name, 0, layout.page_tokens)
        for name in self._shapes:
            first = 0 if name == "experts" else self.layout.choices.selected
            keys = [owned.positions()[owned.rows(first) :] for owned in (*stored, wanted)]
            rows = picked_rows([part.get(name) for part in parts], keys[:-1], keys[-1])
            picked |= {} if rows is None else {name: rows}
        return picked

    def restore(self, tensors: dict[str, torch.Tensor], ownership: PromptOwnership) -> None:
        """Fill the pages and choices from exported ones.

        Raises:
            IntegrityError: a tensor is missing, unexpected, of another shape or dtype, or a choice is impossible.
        """
        rows = ownership.rows()
        choices = dict(self._shapes)
        if not set(choices) & set(tensors):
            choices = {}  # captured without them: nothing is swept through this state
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict(choices)
        for name, layout in self._row_layouts():
            for page in range(layout.pages_for(rows)):
                filled = min(layout.page_tokens, rows - page * layout.page_tokens)
                expected[f"{name}.{page:06d}"] = ((filled, layout.width), layout.dtype)
        if set(tensors) != set(expected):
            wrong = sorted(set(tensors) ^ set(expected))
            raise IntegrityError(f"{self._owner}: pages {wrong} are missing or unexpected")
        for name, (shape, dtype) in expected.items():
            if tuple(tensors[name].shape) != shape or tensors[name].dtype != dtype:
                raise IntegrityError(
                    f"{self._owner} {name}: stored as {tuple(tensors[name].shape)} {tensors[name].dtype}, "
                    f"expected {shape} {dtype}"
                )
        for name in choices:
            self._check_choice(name, tensors[name])
        if ownership.tokens:
            self._allocate()
        for name, run, layout in self._runs():
            for page in range(layout.pages_for(rows)):
                run.write(page * layout.page_tokens, tensors[f"{name}.{page:06d}"])
        self._length = rows
        for name in choices:
            self.record_choice(name, self._first_recorded(name), tensors[name])

    def _check_choice(self, name: str, choice_TK: torch.Tensor) -> None:
        if name == "cut_scores":
            if not bool(torch.isfinite(choice_TK).all()):
                raise IntegrityError(f"{self._owner} {name}: contains a score that is not finite")
            return
        choice_TK = choice_TK.to(torch.int64)
        if name == "experts":
            limit = torch.tensor(self.layout.choices.expert_count - 1)
        else:
            limit = self._ownership.positions()[self._first_selecting :, None]
        if bool((choice_TK > limit).any()) or bool((choice_TK < 0).any()):
            raise IntegrityError(f"{self._owner} {name}: names a token or an expert that cannot have been chosen")

    def _row_layouts(self) -> list[tuple[str, RowLayout]]:
        layouts = (("latents", self.layout.latents), ("index_keys", self.layout.index_keys))
        return [(name, layout) for name, layout in layouts if layout is not None]

    def _runs(self) -> list[tuple[str, PageRun, RowLayout]]:
        """Allocated runs in the order of what a segment produces."""
        runs = {"latents": self._latents, "index_keys": self._index_keys}
        return [(name, run, layout) for name, layout in self._row_layouts() if (run := runs[name]) is not None]

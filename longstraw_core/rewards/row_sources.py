"""Reads the rows of a data file one by one, JSONL or Parquet, without holding the file; checks no field of a row."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from longstraw_core.rewards.parquet_bounds import batch_rows, row_group_problem, row_sizes
from longstraw_core.rewards.rows import RowProblem, RowRefused, parse_object
from longstraw_core.spec import DataRefused, SpecError

MAX_ROW_BYTES = 64 * 2**20
"""Longest line, or row of a Parquet file, that is read: several times the text of a prompt of two million tokens."""
PARQUET_MAGIC = b"PAR1"
HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row as it lies in the file."""

    number: int
    """Zero-based line, or row of a Parquet file."""
    offset: int
    """What `fetch` needs to find it again."""
    fields: dict[str, Any] | RowRefused | None
    """Its fields, what is wrong with it as a whole, or None for a blank line."""


class RowSource(Protocol):
    """A data file that is read twice: all rows once, then chosen rows again."""

    @property
    def media_digest(self) -> str:
        """Digest of the file's bytes; known after `rows` has ended."""
        ...

    def rows(self) -> Iterator[SourceRow]:
        """Read every row."""
        ...

    def fetch(self, places: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any] | None]:
        """Read the rows at (number, offset), ascending; None: the row is not there any more."""
        ...

    def place(self, number: int) -> str:
        """How messages call a row."""
        ...


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its first bytes, whatever it is called.

    Raises:
        SpecError: it cannot be opened.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; data.path must name a JSONL or Parquet file") from error


def open_source(path: Path, name: str) -> RowSource:
    """Open a data file; `name` is how messages call it.

    Raises:
        SpecError: it cannot be opened.
    """
    try:
        return ParquetSource(path, name) if is_parquet(path) else JsonLinesSource(path, name)
    except SpecError as error:
        raise SpecError(str(error).replace(str(path), name, 1)) from error


class JsonLinesSource:
    """One JSON object per line."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._hash = hashlib.sha256()

    @property
    def media_digest(self) -> str:
        """Digest of the file's bytes."""
        return "sha256:" + self._hash.hexdigest()

    def place(self, number: int) -> str:
        """`file:line`."""
        return f"{self._name}:{number + 1}"

    def rows(self) -> Iterator[SourceRow]:
        """Read every line."""
        with self._path.open("rb") as stream:
            for number, offset, content in self._lines(stream):
                if content is None:
                    yield SourceRow(number, offset, _too_long())
                elif not content.strip():
                    yield SourceRow(number, offset, None)
                else:
                    try:
                        yield SourceRow(number, offset, parse_object(content))
                    except RowRefused as refusal:
                        yield SourceRow(number, offset, refusal)

    def fetch(self, places: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any] | None]:
        """Read the lines at the given offsets."""
        with self._path.open("rb") as stream:
            for _, offset in places:
                stream.seek(offset)
                try:
                    yield parse_object(stream.readline(MAX_ROW_BYTES + 1))
                except RowRefused:
                    yield None

    def _lines(self, stream: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield number, byte offset and content (None: longer than MAX_ROW_BYTES) of every line."""
        offset = number = 0
        while content := stream.readline(MAX_ROW_BYTES + 1):
            start = offset
            offset += len(content)
            self._hash.update(content)
            too_long = len(content) > MAX_ROW_BYTES
            while too_long and not content.endswith(b"\n") and (content := stream.readline(MAX_ROW_BYTES)):
                offset += len(content)
                self._hash.update(content)
            yield number, start, None if too_long else content
            number += 1


class ParquetSource:
    """A Parquet file with the same columns as the keys of a JSON row; read in small batches."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._digest = ""

    @property
    def media_digest(self) -> str:
        """Digest of the file's bytes."""
        return "sha256:" + self._digest

    def place(self, number: int) -> str:
        """`file: row N`, counted from 1 as lines are."""
        return f"{self._name}: row {number + 1}"

    def rows(self) -> Iterator[SourceRow]:
        """Read every row."""
        file_hash = hashlib.sha256()
        with self._path.open("rb") as stream:
            while block := stream.read(HASH_BLOCK_BYTES):
                file_hash.update(block)
        self._digest = file_hash.hexdigest()
        number = 0
        for batch in self._batches():
            for place, size in enumerate(row_sizes(batch)):
                # one by one: a batch of the longest rows would fill the memory
                fields = _too_long() if size > MAX_ROW_BYTES else _without_nulls(self._values(batch, place))
                yield SourceRow(number, number, fields)
                number += 1

    def fetch(self, places: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any] | None]:
        """Read chosen rows; no other is converted."""
        batches = self._batches()
        first, batch = 0, None
        for number, _ in places:
            while batch is None or number >= first + batch.num_rows:
                first += 0 if batch is None else batch.num_rows
                batch = next(batches, None)
                if batch is None:
                    yield None
                    return
            row = batch.slice(number - first, 1)
            yield None if row_sizes(row)[0] > MAX_ROW_BYTES else _without_nulls(self._values(row, 0))

    def _batches(self) -> Iterator[Any]:
        import pyarrow
        from pyarrow import parquet

        columns = {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        try:
            with parquet.ParquetFile(str(self._path)) as opened:
                file = cast(Any, opened)
                groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
                for number, group in enumerate(groups):
                    if problem := row_group_problem(group, columns):
                        raise DataRefused(f"{self._name}: row group {number} {problem}")
                present = [name for name in file.schema_arrow.names if name in columns]
                for number, group in enumerate(groups):
                    rows = batch_rows(group, columns)
                    yield from file.iter_batches(batch_size=rows, row_groups=[number], columns=present)
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a name in the footer is not UTF-8
            raise self._unreadable(error) from error

    def _values(self, batch: Any, place: int) -> dict[str, Any]:
        """A row of a batch as plain values; text that is not UTF-8 and times Python cannot hold are refused."""
        try:
            return batch.slice(place, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataRefused:
        reason = " ".join(str(error).split())[:200]
        return DataRefused(f"{self._name}: cannot be read as Parquet: {reason}; write the file again")


def _too_long() -> RowRefused:
    return RowRefused([RowProblem("row", f"longer than {MAX_ROW_BYTES} bytes", "split or shorten it")])


def _without_nulls(value: Any) -> Any:
    """Leave out fields that a Parquet schema forces on rows that do not have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in cast("dict[str, Any]", value).items() if item is not None}
    return [_without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value

"""Reads parts of a snapshot's safetensors files, a bounded piece at a time, straight to where they belong.

A file is mapped into memory, and what was read of it counts as the process's until the file is closed: so it is closed
before it would be more than `PIECE_BYTES`, which is all that host memory holds beside what was asked for.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from longstraw_core.spec.errors import IntegrityError

PIECE_BYTES = 8 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Run:
    """Consecutive elements of one stored tensor, in row-major order."""

    name: str
    first: int
    count: int


class WeightFiles:
    """The stored tensors of one snapshot.

    Raises:
        IntegrityError: there is no readable safetensors file or index.
    """

    def __init__(self, snapshot: Path) -> None:
        self._snapshot = snapshot
        self._open: tuple[str, Any] | None = None
        self._read_bytes = 0
        self._files = self._find()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a stored tensor's shape.

        Raises:
            IntegrityError: the tensor is missing, or its file cannot be read.
        """
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a stored tensor's element type as safetensors calls it, such as `BF16`.

        Raises:
            IntegrityError: the tensor is missing, or its file cannot be read.
        """
        return self._slice(name).get_dtype()

    def copy_elements(self, runs: Sequence[Run], first: int, out: torch.Tensor) -> None:
        """Fill flat `out` with the elements from number `first` on of `runs` laid end to end, in the dtype of `out`.

        Raises:
            IntegrityError: a tensor is missing, or its file cannot be read.
        """
        start, last = 0, first + out.numel()
        for run in runs:
            begin, end = max(first, start), min(last, start + run.count)
            if begin < end:
                self._copy_run(run.name, run.first + begin - start, out[begin - first : end - first])
            start += run.count

    def close(self) -> None:
        """Give back the memory of the file that is open."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
        self._open, self._read_bytes = None, 0

    def _copy_run(self, name: str, first: int, out: torch.Tensor) -> None:
        shape = self.shape(name)
        row_elements = math.prod(shape[1:])
        step = max(1, PIECE_BYTES // (row_elements * out.element_size()))
        last = first + out.numel()
        for row in range(first // row_elements, -(-last // row_elements), step):
            end = min(row + step, -(-last // row_elements))
            begin, stop = max(first, row * row_elements), min(last, end * row_elements)
            if self._read_bytes + (end - row) * row_elements * out.element_size() > PIECE_BYTES:
                self.close()
            with self._reading(name):
                rows = self._slice(name)[row:end].reshape(-1)
            out[begin - first : stop - first].copy_(rows[begin - row * row_elements : stop - row * row_elements])
            self._read_bytes += rows.nbytes

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise IntegrityError(f"model.snapshot: {self._snapshot} lacks tensor {name}")
        file = self._files[name]
        with self._reading(name):
            if self._open is None or self._open[0] != file:
                self.close()
                self._open = (file, safe_open(self._snapshot / file, framework="pt").__enter__())
            return self._open[1].get_slice(name)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise IntegrityError(
                f"model.snapshot: tensor {name} in {self._snapshot} cannot be read: {error}"
            ) from error

    def _find(self) -> dict[str, str]:
        index = self._snapshot / _INDEX
        try:
            if index.is_file():
                files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            else:
                with safe_open(self._snapshot / _SINGLE, framework="pt") as file:
                    files = dict.fromkeys(file.keys(), _SINGLE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise IntegrityError(f"model.snapshot: {self._snapshot} cannot be loaded: {error}") from error
        for name, file in files.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise IntegrityError(f"model.snapshot: {index} puts tensor {name} into {file!r}, which is no file name")
        return files

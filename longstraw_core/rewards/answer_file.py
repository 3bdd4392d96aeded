"""Reads the lines that `longstraw rewards` scores: `{"id", "response", "ground_truth"}`, one JSON object each."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw_core.spec import DataRefused, SpecError

MAX_LINE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class AnsweredRow:
    """One response with the ground truth it is compared with; other keys of the line are ignored."""

    row_id: str | int
    response: str
    ground_truth: str | None
    """None: missing or no text; an error of the row, which is scored as such."""


def read_answers(path: Path) -> Iterator[AnsweredRow]:
    """Yield every row of the file, one at a time.

    Raises:
        SpecError: it cannot be opened, or is a pipe: the file is read once to check it and once more to score it.
        DataRefused: a line is no object with an id and a response; the message names the line.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; --in must name a JSONL file") from error
    with stream:
        if not stream.seekable():
            raise SpecError(f"{path}: a pipe, which can be read only once; --in must name a file")
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataRefused(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes; split or shorten it")
            if line.strip():
                yield _row(line, f"{path}:{number}")


def _row(line: bytes, place: str) -> AnsweredRow:
    example = 'write {"id": "a1", "response": "...", "ground_truth": "42"}'
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataRefused(f"{place}: not JSON: {str(error)[:80]}; {example}") from error
    if not isinstance(fields, dict):
        raise DataRefused(f"{place}: not an object; {example}")
    row_id, response, truth = fields.get("id"), fields.get("response"), fields.get("ground_truth")
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise DataRefused(f"{place}: id is missing or neither text nor a whole number; {example}")
    if not isinstance(response, str):
        raise DataRefused(f"{place}: response is missing or no text; {example}")
    return AnsweredRow(row_id, response, truth if isinstance(truth, str) else None)

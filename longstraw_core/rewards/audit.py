"""Reads a file of DAPO-style rows, refuses what is wrong with all of it named, and selects a transaction's prompts.

The file is read twice and never held: the first pass checks every row, finds duplicates by digest and keeps one
offset per usable row; the second tokenizes each usable row to check its length and keeps the ids of selected rows
only. Memory grows with the number of different prompts, not with their length.

`prompt_id` is `extra_info.index` when that is a string safe in file names (a UUID is) and no other usable row has
it; otherwise `prompt-` and the 32 hex digits of the digest of roles and contents, so it survives a reordered
file. With `duplicates: keep` a repeated row is a prompt of its own and `-row<N>` is appended to that digest form.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from longstraw_core.rewards.prompt_tokens import PromptTokenizer
from longstraw_core.rewards.rows import Row, RowProblem, RowRefused, parse_row, shown
from longstraw_core.rewards.selection import select_rows
from longstraw_core.spec import DataRefused, Prompt, SpecError
from longstraw_core.spec.model import Count, FiniteFloat, PositiveCount, Sha256, StrictModel
from longstraw_core.spec.transaction import DataSpec

MAX_ROW_BYTES = 64 * 2**20
"""Longest line that is read: several times the text of a prompt of two million tokens."""
LISTED_PROBLEMS = 20
"""How many problems are named one by one; the rest is counted."""


class TokenDistribution(StrictModel):
    """Prompt lengths in tokens over all usable rows."""

    total: Count
    mean: FiniteFloat
    min: Count
    median: Count
    p90: Count
    max: Count


class SelectedRow(StrictModel):
    """One prompt of this transaction."""

    prompt_id: str
    row: Count
    tokens: PositiveCount


class AuditReport(StrictModel):
    """What the audit read, what it left out and what it chose."""

    data_digest: Sha256
    """Digest of the file's bytes."""
    rows: Count
    blank_lines: Count
    unique_prompts: Count
    duplicates_found: Count
    duplicates_dropped: Count
    duplicates_policy: str
    eligible: Count
    """Rows that a transaction may read."""
    token_limit: PositiveCount
    prompt_tokens: TokenDistribution
    seed: Count
    transaction: PositiveCount
    position: Count
    """Rows read by all earlier transactions."""
    epoch: Count
    selected: tuple[SelectedRow, ...]


@dataclass(frozen=True)
class Audit:
    """The prompts of one transaction and the report about the file they come from."""

    prompts: tuple[Prompt, ...]
    report: AuditReport


def accept_any_truth(_ground_truth: str) -> str | None:
    """Accept every non-empty ground truth."""
    return None


def audit_rows(
    path: Path,
    *,
    data: DataSpec,
    seed: int,
    transaction: int,
    tokenize: PromptTokenizer,
    token_limit: int,
    vocabulary: int,
    check_truth: Callable[[str], str | None] = accept_any_truth,
    shown_as: str | None = None,
) -> Audit:
    """Audit the whole file and return the prompts of `transaction`.

    `check_truth` is the scorer's own test of a ground truth; `shown_as` is how messages call the file.

    Raises:
        SpecError: the file cannot be opened.
        DataRefused: any row is bad, or fewer usable rows than one transaction needs. The message lists the bad
            rows, one per line.
    """
    name = shown_as or str(path)
    try:
        stream = path.open("rb")
    except OSError as error:
        raise SpecError(f"{name}: {error.strerror}; data.path must name a JSONL file") from error
    with stream:
        survey = _survey(stream, name, data, check_truth)
        selection = select_rows(
            len(survey.usable),
            per_transaction=data.prompts_per_transaction,
            transaction=transaction,
            seed=seed,
            shuffle=data.shuffle,
        )
        wanted = frozenset(selection.indices)
        prompt_of, lengths = _tokenize(stream, name, survey, wanted, tokenize, token_limit, vocabulary, check_truth)
    prompts = tuple(prompt_of[index] for index in selection.indices)
    report = AuditReport(
        data_digest=survey.data_digest,
        rows=survey.rows,
        blank_lines=survey.blank_lines,
        unique_prompts=len(survey.first_seen),
        duplicates_found=survey.duplicates,
        duplicates_dropped=survey.duplicates if data.duplicates == "drop" else 0,
        duplicates_policy=data.duplicates,
        eligible=len(survey.usable),
        token_limit=token_limit,
        prompt_tokens=_distribution(lengths),
        seed=seed,
        transaction=transaction,
        position=selection.position,
        epoch=selection.epoch,
        selected=tuple(
            SelectedRow(prompt_id=prompt.prompt_id, row=prompt.row, tokens=len(prompt.token_ids)) for prompt in prompts
        ),
    )
    return Audit(prompts=prompts, report=report)


@dataclass(frozen=True, slots=True)
class _UsableRow:
    """Where a usable row is and what identifies it."""

    line: int
    offset: int
    digest: bytes
    index: str | None
    copy: bool


@dataclass
class _Survey:
    """What the first pass found."""

    data_digest: str = ""
    rows: int = 0
    blank_lines: int = 0
    duplicates: int = 0
    usable: list[_UsableRow] = field(default_factory=list[_UsableRow])
    first_seen: dict[bytes, tuple[int, bytes]] = field(default_factory=dict[bytes, tuple[int, bytes]])
    """Prompt digest to the line it was first seen on and the digest of its ground truth."""
    index_uses: Counter[str] = field(default_factory=Counter[str])

    def prompt_id(self, row: _UsableRow) -> str:
        if row.index is not None and self.index_uses[row.index] == 1 and not row.index.startswith("prompt-"):
            return row.index
        return f"prompt-{row.digest.hex()}" + (f"-row{row.line - 1}" if row.copy else "")


class _Problems:
    """Collects what is wrong with the file; lists the first ones and counts all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[str] = []
        self._count = 0
        self._rows = 0

    def add(self, line: int, problems: list[RowProblem]) -> None:
        self._rows += 1
        for problem in problems:
            self._count += 1
            if len(self._lines) < LISTED_PROBLEMS:
                self._lines.append(problem.at(f"{self._name}:{line}"))

    def refuse_any(self) -> None:
        if not self._count:
            return
        if self._count == 1:
            raise DataRefused(self._lines[0])
        title = f"{self._name}: {self._count} problems in {self._rows} rows; nothing was computed"
        unlisted = self._count - len(self._lines)
        more = [f"... and {unlisted} more"] if unlisted else []
        raise DataRefused("\n".join([title, *self._lines, *more]))


def _survey(stream: BinaryIO, name: str, data: DataSpec, check_truth: Callable[[str], str | None]) -> _Survey:
    survey = _Survey()
    problems = _Problems(name)
    file_hash = hashlib.sha256()
    for line, offset, content in _lines(stream, file_hash.update):
        if content is not None and not content.strip():
            survey.blank_lines += 1
            continue
        survey.rows += 1
        try:
            _register(survey, line, offset, _parsed(content, check_truth), data)
        except RowRefused as refusal:
            problems.add(line, refusal.problems)
    if not survey.rows:
        raise DataRefused(f"{name}: no rows in the file; write one JSON object per line")
    problems.refuse_any()
    survey.data_digest = "sha256:" + file_hash.hexdigest()
    return survey


def _lines(stream: BinaryIO, update_hash: Callable[[bytes], None]) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield line number, byte offset and content (None: longer than MAX_ROW_BYTES) of every line."""
    offset = 0
    line = 0
    while content := stream.readline(MAX_ROW_BYTES + 1):
        line += 1
        start = offset
        offset += len(content)
        update_hash(content)
        too_long = len(content) > MAX_ROW_BYTES
        while too_long and not content.endswith(b"\n") and (content := stream.readline(MAX_ROW_BYTES)):
            offset += len(content)
            update_hash(content)
        yield line, start, None if too_long else content


def _parsed(content: bytes | None, check_truth: Callable[[str], str | None]) -> Row:
    if content is None:
        raise RowRefused([RowProblem("row", f"longer than {MAX_ROW_BYTES} bytes", "split or shorten it")])
    return parse_row(content, check_truth)


def _register(survey: _Survey, line: int, offset: int, row: Row, data: DataSpec) -> None:
    """Add a sound row to the survey, or raise RowRefused for what it repeats or contradicts."""
    digest = row.prompt_digest()
    truth = row.ground_truth.strip()
    truth_digest = hashlib.blake2b(truth.encode(), digest_size=16).digest()
    first_line, first_truth = survey.first_seen.setdefault(digest, (line, truth_digest))
    if first_truth != truth_digest:
        what = f"{shown(truth)} contradicts the ground truth of the same prompt on line {first_line}"
        raise RowRefused([RowProblem("reward_model.ground_truth", what, "keep the right one, remove the other")])
    copy = first_line != line
    if copy:
        survey.duplicates += 1
        if data.duplicates == "fail":
            what = f"same prompt and ground truth as line {first_line}"
            raise RowRefused([RowProblem("row", what, "remove it, or set data.duplicates to drop or keep")])
        if data.duplicates == "drop":
            return
    survey.usable.append(_UsableRow(line=line, offset=offset, digest=digest, index=row.index, copy=copy))
    if row.index is not None:
        survey.index_uses[row.index] += 1


def _tokenize(
    stream: BinaryIO,
    name: str,
    survey: _Survey,
    wanted: frozenset[int],
    tokenize: PromptTokenizer,
    token_limit: int,
    vocabulary: int,
    check_truth: Callable[[str], str | None],
) -> tuple[dict[int, Prompt], list[int]]:
    """Tokenize every usable row; return the prompts of selected rows and the lengths of all."""
    problems = _Problems(name)
    prompts: dict[int, Prompt] = {}
    lengths: list[int] = []
    for position, usable in enumerate(survey.usable):
        stream.seek(usable.offset)
        try:
            row = parse_row(stream.readline(MAX_ROW_BYTES + 1), check_truth)
        except RowRefused:
            row = None
        if row is None or row.prompt_digest() != usable.digest:
            raise DataRefused(f"{name}:{usable.line}: the file changed while it was read; run the audit again")
        try:
            ids = tokenize([{"role": role, "content": content} for role, content in row.messages])
            _check_ids(ids, token_limit, vocabulary)
        except ValueError as error:
            problems.add(usable.line, [RowProblem("prompt", str(error), "change the data template or drop the row")])
            continue
        except RowRefused as refusal:
            problems.add(usable.line, refusal.problems)
            continue
        lengths.append(len(ids))
        if position in wanted:
            prompts[position] = Prompt(
                prompt_id=survey.prompt_id(usable),
                token_ids=tuple(ids),
                ground_truth=row.ground_truth,
                data_source=row.data_source,
                row=usable.line - 1,
            )
    problems.refuse_any()
    return prompts, lengths


def _check_ids(ids: list[int], token_limit: int, vocabulary: int) -> None:
    if not ids:
        what = "no tokens after the chat template"
        raise RowRefused([RowProblem("prompt", what, "correct the snapshot's chat template")])
    if len(ids) > token_limit:
        what = f"{len(ids)} tokens after the chat template, at most {token_limit} are allowed"
        remedy = "shorten it, or raise data.max_prompt_tokens or lower sampling.max_response_tokens within the model"
        raise RowRefused([RowProblem("prompt", what, remedy)])
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        what = f"token id {outside} is outside the model's vocabulary of {vocabulary}"
        raise RowRefused([RowProblem("prompt", what, "use the tokenizer that belongs to the model snapshot")])


def _distribution(lengths: list[int]) -> TokenDistribution:
    ordered = sorted(lengths)
    count = len(ordered)
    return TokenDistribution(
        total=sum(ordered),
        mean=sum(ordered) / count,
        min=ordered[0],
        median=ordered[(count - 1) // 2],
        p90=ordered[min(count - 1, (9 * count) // 10)],
        max=ordered[-1],
    )

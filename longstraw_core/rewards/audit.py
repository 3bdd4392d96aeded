"""Reads a file of DAPO-style rows, decides by policy about every problem, and selects a transaction's prompts.

The file is read twice and never held: the first pass checks every row, finds duplicates by digest and keeps one
place per usable row; the second tokenizes each usable row to check its length and keeps the ids of selected rows
only. Memory grows with the number of different prompts, not with their length.

`prompt_id` is `extra_info.index` when that is a string safe in file names (a UUID is) and no other usable row has
it; otherwise `prompt-` and the 32 hex digits of the digest of roles and contents, so it survives a reordered
file. Where a prompt is kept more than once (`duplicates` or `conflicting_truths: keep`), `-row<N>` is appended to that
digest form from the second on.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from longstraw_core.rewards.prompt_tokens import PromptTokenizer
from longstraw_core.rewards.row_sources import RowSource, open_source
from longstraw_core.rewards.rows import ProblemKind, Row, RowProblem, RowRefused, parse_row, shown
from longstraw_core.rewards.selection import select_rows
from longstraw_core.spec import DataRefused, Prompt
from longstraw_core.spec.model import Count, FiniteFloat, PositiveCount, Sha256, StrictModel
from longstraw_core.spec.transaction import DataSpec

LISTED_PROBLEMS = 20
"""How many problems of a kind are named one by one; the rest is counted."""


class TokenDistribution(StrictModel):
    """Prompt lengths in tokens over all usable rows."""

    total: Count
    mean: FiniteFloat
    min: Count
    median: Count
    p90: Count
    max: Count


class Finding(StrictModel):
    """Everything the audit found of one kind and what the policy made of it."""

    kind: str
    """Name of the policy in `data`."""
    policy: str
    rows: Count
    dropped: Count
    examples: tuple[str, ...]
    """The first ones: place, field, what, remedy."""


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
    conflicting_prompts: Count
    """Prompts that occur with different ground truths."""
    findings: tuple[Finding, ...]
    """One entry per kind of problem, also when none was found."""
    eligible: Count
    """Rows that a transaction may read."""
    token_limit: PositiveCount
    prompt_tokens: TokenDistribution
    seed: Count
    transaction: PositiveCount
    position: Count
    """Rows read by all earlier transactions; the next transaction starts where this one ends."""
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
        DataRefused: a row has a problem whose policy is `fail`, or fewer usable rows are left than one transaction
            needs. The message lists the rows, one per line.
    """
    source = open_source(path, shown_as or str(path))
    findings = _Findings(source, shown_as or str(path), data)
    survey = _survey(source, data, check_truth, findings)
    lengths = _tokenize(source, survey, tokenize, token_limit, vocabulary, findings)
    selection = select_rows(
        len(survey.usable),
        per_transaction=data.prompts_per_transaction,
        transaction=transaction,
        seed=seed,
        shuffle=data.shuffle,
    )
    prompts = _prompts(source, survey, selection.indices, tokenize, findings)
    report = AuditReport(
        data_digest=source.media_digest,
        rows=survey.rows,
        blank_lines=survey.blank_lines,
        unique_prompts=len(survey.first_truth),
        duplicates_found=survey.duplicates,
        duplicates_dropped=survey.duplicates if data.duplicates == "drop" else 0,
        duplicates_policy=data.duplicates,
        conflicting_prompts=len(survey.conflicting),
        findings=findings.report(),
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

    number: int
    offset: int
    digest: bytes
    index: str | None
    copy: bool


@dataclass
class _Survey:
    """What the first pass found."""

    rows: int = 0
    blank_lines: int = 0
    duplicates: int = 0
    usable: list[_UsableRow] = field(default_factory=list[_UsableRow])
    seen: dict[tuple[bytes, bytes], int] = field(default_factory=dict[tuple[bytes, bytes], int])
    """Digests of prompt and ground truth to the row they were first seen in."""
    first_truth: dict[bytes, tuple[int, bytes]] = field(default_factory=dict[bytes, tuple[int, bytes]])
    """Prompt digest to the row it was first seen in and the digest of its ground truth."""
    conflicting: set[bytes] = field(default_factory=set[bytes])
    index_uses: Counter[str] = field(default_factory=Counter[str])

    def prompt_id(self, row: _UsableRow) -> str:
        if row.index is not None and self.index_uses[row.index] == 1 and not row.index.startswith("prompt-"):
            return row.index
        return f"prompt-{row.digest.hex()}" + (f"-row{row.number}" if row.copy else "")


class _Findings:
    """Collects what is wrong with the rows, by kind; refuses the file for what the policy calls fatal."""

    _KINDS: tuple[ProblemKind, ...] = (
        "duplicates",
        "conflicting_truths",
        "bad_truths",
        "too_long_prompts",
        "wrong_types",
        "control_characters",
    )

    def __init__(self, source: RowSource, name: str, data: DataSpec) -> None:
        self._source = source
        self._name = name
        self._policy: dict[ProblemKind, str] = {kind: getattr(data, kind) for kind in self._KINDS}
        self._policy["unusable"] = "fail"
        self._rows: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._fatal: list[str] = []
        self._fatal_count = 0
        self._fatal_rows = 0

    def add(self, number: int, problems: list[RowProblem], *, dropped: bool) -> None:
        """Note the problems of a row; they are fatal when any of their policies is `fail`."""
        place = self._source.place(number)
        for kind in {problem.kind for problem in problems}:
            self._rows[kind] += 1
            self._dropped[kind] += dropped
        for problem in problems:
            examples = self._examples.setdefault(problem.kind, [])
            if len(examples) < LISTED_PROBLEMS:
                examples.append(problem.at(place))
        fatal = [problem for problem in problems if self._policy[problem.kind] == "fail"]
        self._fatal_rows += bool(fatal)
        for problem in fatal:
            self._fatal_count += 1
            if len(self._fatal) < LISTED_PROBLEMS:
                self._fatal.append(problem.at(place))

    def dropped_later(self, kind: ProblemKind, rows: int) -> None:
        """Count rows that were dropped after all rows had been seen."""
        self._dropped[kind] = rows

    def refuse_any(self) -> None:
        if not self._fatal_count:
            return
        if self._fatal_count == 1:
            raise DataRefused(self._fatal[0])
        title = f"{self._name}: {self._fatal_count} problems in {self._fatal_rows} rows; nothing was computed"
        unlisted = self._fatal_count - len(self._fatal)
        raise DataRefused("\n".join([title, *self._fatal, *([f"... and {unlisted} more"] if unlisted else [])]))

    def refuse_empty(self) -> None:
        raise DataRefused(f"{self._name}: no rows in the file; write one JSON object per line")

    def refuse_changed(self, number: int) -> None:
        place = self._source.place(number)
        raise DataRefused(f"{place}: the file changed while it was read; run the audit again")

    def report(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(
                kind=kind,
                policy=self._policy[kind],
                rows=self._rows[kind],
                dropped=self._dropped[kind],
                examples=tuple(self._examples.get(kind, ())),
            )
            for kind in self._KINDS
        )


def _survey(
    source: RowSource, data: DataSpec, check_truth: Callable[[str], str | None], findings: _Findings
) -> _Survey:
    survey = _Survey()
    keep_control_characters = data.control_characters == "keep"
    for found in source.rows():
        if found.fields is None:
            survey.blank_lines += 1
            continue
        survey.rows += 1
        try:
            if isinstance(found.fields, RowRefused):
                raise found.fields
            row = parse_row(found.fields, check_truth, keep_control_characters=keep_control_characters)
        except RowRefused as refusal:
            findings.add(found.number, refusal.problems, dropped=True)
            continue
        if row.notes:
            findings.add(found.number, list(row.notes), dropped=False)
        _register(survey, source, found.number, found.offset, row, data, findings)
    if not survey.rows:
        findings.refuse_empty()
    if data.conflicting_truths == "drop" and survey.conflicting:
        before = len(survey.usable)
        survey.usable = [row for row in survey.usable if row.digest not in survey.conflicting]
        findings.dropped_later("conflicting_truths", before - len(survey.usable))
    findings.refuse_any()
    for usable in survey.usable:
        if usable.index is not None:
            survey.index_uses[usable.index] += 1
    return survey


def _register(
    survey: _Survey, source: RowSource, number: int, offset: int, row: Row, data: DataSpec, findings: _Findings
) -> None:
    """Add a sound row to the survey, or note what it repeats or contradicts."""
    digest = row.prompt_digest()
    truth = row.ground_truth.strip()
    truth_digest = hashlib.blake2b(truth.encode(), digest_size=16).digest()
    first, first_truth = survey.first_truth.setdefault(digest, (number, truth_digest))
    same = survey.seen.setdefault((digest, truth_digest), number)
    if same != number:
        survey.duplicates += 1
        what = f"same prompt and ground truth as {_at(source, same)}"
        remedy = "remove it, or set data.duplicates to drop or keep"
        problem = RowProblem("row", what, remedy, "duplicates")
        findings.add(number, [problem], dropped=data.duplicates == "drop")
        if data.duplicates != "keep":
            return
    elif first_truth != truth_digest:
        survey.conflicting.add(digest)
        what = f"{shown(truth)} contradicts the ground truth of the same prompt on {_at(source, first)}"
        remedy = "keep the right one, remove the other"
        problem = RowProblem("reward_model.ground_truth", what, remedy, "conflicting_truths")
        findings.add(number, [problem], dropped=False)
    survey.usable.append(_UsableRow(number, offset, digest, row.index, copy=first != number))


def _at(source: RowSource, number: int) -> str:
    """`line 3` or `row 3`."""
    return ("row " if ": row " in source.place(number) else "line ") + str(number + 1)


def _tokenize(
    source: RowSource,
    survey: _Survey,
    tokenize: PromptTokenizer,
    token_limit: int,
    vocabulary: int,
    findings: _Findings,
) -> list[int]:
    """Tokenize every usable row; keep those that fit and return their lengths."""
    fitting: list[_UsableRow] = []
    lengths: list[int] = []
    for usable, row in _again(source, survey.usable, findings):
        try:
            ids = _ids(row, tokenize)
            _check_ids(ids, token_limit, vocabulary)
        except RowRefused as refusal:
            findings.add(usable.number, refusal.problems, dropped=True)
            continue
        fitting.append(usable)
        lengths.append(len(ids))
    findings.refuse_any()
    survey.usable = fitting
    return lengths


def _prompts(
    source: RowSource,
    survey: _Survey,
    indices: tuple[int, ...],
    tokenize: PromptTokenizer,
    findings: _Findings,
) -> tuple[Prompt, ...]:
    """Make the selected prompts, in the order of the selection."""
    chosen = sorted((survey.usable[index] for index in indices), key=lambda usable: usable.number)
    made = {
        usable.number: Prompt(
            prompt_id=survey.prompt_id(usable),
            token_ids=tuple(_ids(row, tokenize)),
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            row=usable.number,
        )
        for usable, row in _again(source, chosen, findings)
    }
    return tuple(made[survey.usable[index].number] for index in indices)


def _again(source: RowSource, places: list[_UsableRow], findings: _Findings) -> Iterator[tuple[_UsableRow, Row]]:
    """Read sound rows once more and insist that they are what they were."""
    again = source.fetch((usable.number, usable.offset) for usable in places)
    for usable in places:
        fields = next(again, None)
        try:
            row = None if fields is None else parse_row(fields, accept_any_truth, keep_control_characters=True)
        except RowRefused:
            row = None
        if row is None or row.prompt_digest() != usable.digest:
            findings.refuse_changed(usable.number)
        else:
            yield usable, row


def _ids(row: Row, tokenize: PromptTokenizer) -> list[int]:
    try:
        return tokenize([{"role": role, "content": content} for role, content in row.messages])
    except ValueError as error:
        remedy = "change the data template or drop the row"
        raise RowRefused([RowProblem("prompt", str(error), remedy, "wrong_types")]) from error


def _check_ids(ids: list[int], token_limit: int, vocabulary: int) -> None:
    if not ids:
        what = "no tokens after the chat template"
        raise RowRefused([RowProblem("prompt", what, "correct the snapshot's chat template", "unusable")])
    if len(ids) > token_limit:
        what = f"{len(ids)} tokens after the chat template, at most {token_limit} are allowed"
        remedy = "shorten it, or raise data.max_prompt_tokens or lower sampling.max_response_tokens within the model"
        raise RowRefused([RowProblem("prompt", what, remedy, "too_long_prompts")])
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        what = f"token id {outside} is outside the model's vocabulary of {vocabulary}"
        raise RowRefused(
            [RowProblem("prompt", what, "use the tokenizer that belongs to the model snapshot", "unusable")]
        )


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

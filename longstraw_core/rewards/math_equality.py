"""The reward `math_verify`: +1 when the stated answer equals the ground truth as mathematics, −1 otherwise.

Exact integers first, then bounded exact arithmetic in this process, then sympy and math-verify in killable workers.
Equal pairs of texts are compared once. The policy, in words: docs/rewards.md.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from longstraw_core.rewards.math_answers import normal_form
from longstraw_core.rewards.math_answers.cleaning import clean
from longstraw_core.rewards.math_answers.comparison import same_answer
from longstraw_core.rewards.math_answers.extraction import AnswerFormat, FinalAnswer, final_answer
from longstraw_core.rewards.math_answers.limits import MAX_CANDIDATES, OverLimit, Unreadable
from longstraw_core.rewards.math_answers.quantities import comparisons, same_choice
from longstraw_core.rewards.math_answers.reading import Reading, StatesAnother, read_answer, read_truth
from longstraw_core.rewards.math_answers.words import has_words, normalised_words
from longstraw_core.rewards.verdict import Verdict, VerdictStatus
from longstraw_core.rewards.workers import WorkerPool

RULE = "math_verify"
SHOWN_CHARACTERS = 200
"""Longest extracted or canonical text that is kept."""
MAX_LIBRARY_LITERAL = 10_000
"""Largest number in a text that is handed to the library: it would try to compute sums and powers of any size."""

_NOT_FOR_LIBRARY = re.compile(r"_{2}|[\"'`#@?]|\.\.|\\[lc]?dots(?![A-Za-z])|[\x00-\x1f]")
"""Program text, and lists that go on."""
_ENDLESS = re.compile(r"\\(?:sum|prod|i*nt|oint|lim)(?![A-Za-z])")
"""What a response could make the library compute for as long as it likes; done only where the ground truth does it."""
_MEANINGLESS_BLANK = re.compile(r"\s+(?![0-9A-Za-z.])|(?<![0-9A-Za-z.,])\s+")
Pair = tuple[str, str, bool]
"""A stated value, a ground truth, and whether the value is the whole response."""


@dataclass(frozen=True)
class _Decision:
    """What is known about one pair of texts; `open` means that a worker must decide."""

    correct: bool
    status: VerdictStatus
    rule: str
    canonical: str | None = None
    open: tuple[str, str] | None = None


class MathScorer:
    """Scores responses by mathematical equality; use as a context manager, so that its workers end."""

    def __init__(
        self, *, answer_format: AnswerFormat = "any", deadline_seconds: float = 3.0, workers: int | None = None
    ) -> None:
        self._format: AnswerFormat = answer_format
        self._pool = WorkerPool(("math",), deadline_seconds=deadline_seconds, workers=workers)
        self._decided: dict[Pair, _Decision] = {}
        self._truths: dict[str, Reading | str] = {}

    @property
    def name(self) -> str:
        """The rule and its variant, as receipts show it."""
        return RULE if self._format == "any" else f"{RULE}:{self._format}"

    def __enter__(self) -> "MathScorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def truth_problem(self, ground_truth: str) -> str | None:
        """Say why a ground truth is no value that an answer could equal; None when it is one."""
        found = self._truth(ground_truth)
        return found if isinstance(found, str) else None

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return the verdict on every (response, ground truth), in order."""
        stated: list[Verdict | FinalAnswer] = []
        wanted: dict[Pair, None] = {}
        for response, ground_truth in pairs:
            problem = self.truth_problem(ground_truth)
            if problem is not None:
                stated.append(Verdict(-1.0, False, "bad_row", None, f"{RULE}:bad_truth"))
                continue
            answer = final_answer(response, self._format)
            if not answer.values:
                stated.append(Verdict(-1.0, False, "no_answer", None, f"{RULE}:{answer.rule}"))
                continue
            if len(answer.values) > MAX_CANDIDATES:
                shown = _shown("; ".join(answer.values))
                stated.append(Verdict(-1.0, False, "ok", shown, f"{RULE}:several_values"))
                continue
            stated.append(answer)
            for value in self._to_compare(answer, ground_truth):
                wanted.setdefault((value, ground_truth, answer.rule == "whole_text"))
        self._decide([pair for pair in wanted if pair not in self._decided])
        return [
            found if isinstance(found, Verdict) else self._verdict(found, ground_truth)
            for found, (_, ground_truth) in zip(stated, pairs, strict=True)
        ]

    def _to_compare(self, answer: FinalAnswer, ground_truth: str) -> list[str]:
        """The stated values; and as one list, when the ground truth is a list of as many."""
        truth = self._truth(ground_truth)
        values = list(answer.values)
        node = truth.node if isinstance(truth, Reading) and len(values) > 1 else None
        if node is not None and node.operation == "list" and node.name in ("", "{}") and len(node.parts) == len(values):
            values.append(" , ".join(f"${value}$" for value in map(_readable, answer.values)))
        return values

    def _verdict(self, answer: FinalAnswer, ground_truth: str) -> Verdict:
        bare = answer.rule == "whole_text"
        decisions = [self._decided[value, ground_truth, bare] for value in self._to_compare(answer, ground_truth)]
        extracted = _shown("; ".join(_readable(value) for value in answer.values))
        alone, together = decisions[: len(answer.values)], decisions[len(answer.values) :]
        wrong = [decision for decision in alone if not decision.correct]
        if not wrong or (together and together[0].correct):
            first = together[0] if wrong else alone[0]
            return Verdict(1.0, True, "ok", extracted, f"{RULE}:{first.rule}", first.canonical)
        if len(alone) > 1:
            return Verdict(-1.0, False, "ok", extracted, f"{RULE}:several_values")
        only = wrong[0]
        return Verdict(-1.0, False, only.status, extracted, f"{RULE}:{only.rule}", only.canonical)

    def _truth(self, ground_truth: str) -> Reading | str:
        known = self._truths.get(ground_truth)
        if known is None:
            known = self._truths[ground_truth] = self._read_truth(ground_truth)
        return known

    def _read_truth(self, ground_truth: str) -> Reading | str:
        try:
            reading = read_truth(ground_truth)
        except OverLimit:
            return Reading(clean(ground_truth), None)
        except Unreadable as error:
            return self._outside_grammar(ground_truth, str(error))
        try:
            if reading.node is not None:
                same_answer(reading.node, reading.node)
        except OverLimit:
            pass  # it can still be met in the same form
        except Unreadable as error:
            return f"is not one mathematical value: {error}"
        return reading

    def _outside_grammar(self, ground_truth: str, problem: str) -> Reading | str:
        """Accept what our grammar does not know and math-verify reads."""
        try:
            text = clean(ground_truth)
        except Unreadable as error:
            return str(error)
        if self._library_reads(text):
            return Reading(text, None)
        return problem if problem.startswith("is ") else f"is not one mathematical value: {problem}"

    def _library_reads(self, text: str) -> bool:
        try:
            if not _for_library(text):
                return False
        except OverLimit:
            return False
        (outcome,) = self._pool.run([{"reads": text}])
        return not isinstance(outcome, str) and bool(outcome.get("reads"))

    def _decide(self, pairs: list[Pair]) -> None:
        """Decide pairs of texts: at once where exact arithmetic can, the rest by the workers."""
        left: dict[Pair, tuple[str, str]] = {}
        for pair in pairs:
            value, ground_truth, bare = pair
            truth = self._truth(ground_truth)
            if isinstance(truth, str):
                raise AssertionError("bad truths are sorted out before")
            decision = _decided_here(value, truth, bare=bare)
            self._decided[pair] = decision
            if decision.open is not None:
                left[pair] = decision.open
        questions = list(dict.fromkeys(left.values()))
        outcomes = self._pool.run([{"truth": truth, "answer": answer} for truth, answer in questions])
        answered = dict(zip(questions, outcomes, strict=True))
        for pair, question in left.items():
            self._decided[pair] = _from_worker(self._decided[pair], answered[question])


def _decided_here(value: str, truth: Reading, *, bare: bool) -> _Decision:
    try:
        answer = read_truth(value) if bare else read_answer(value)
    except OverLimit:
        return _Decision(False, "timeout", "over_limit")
    except StatesAnother:
        return _Decision(False, "no_answer", "another_value")
    except Unreadable:
        return _undecided_text(value, truth)
    if answer.text == truth.text or (
        answer.node is not None and answer.node == truth.node and answer.unit == truth.unit and not answer.approximate
    ):
        rule = "same_form" if answer.node is None or truth.node is None else _rule_of(answer, truth)
        rule = rule if rule in ("integer", "rational") else "same_form"
        return _Decision(True, "ok", rule, canonical_text(answer))
    if same_choice(truth, answer):
        return _Decision(True, "ok", "choice", canonical_text(answer))
    if answer.node is None or truth.node is None:
        return _words(answer, truth, bare=bare)
    canonical = canonical_text(answer)
    if answer.approximate and not truth.approximate:
        return _Decision(False, "ok", "approximate", canonical)
    return _compared(answer, truth, canonical)


def _compared(answer: Reading, truth: Reading, canonical: str) -> _Decision:
    if truth.node is None or answer.node is None:
        raise AssertionError("words are compared before")
    pairs = comparisons(truth, answer)
    if not pairs:
        return _Decision(False, "ok", "unit", canonical)
    try:
        for pair in pairs:
            outcome = same_answer(pair.truth, pair.answer)
            if outcome:
                return _Decision(True, "ok", _rule_of(answer, truth), canonical)
            if outcome is None:
                return _Decision(False, "timeout", "undecided", canonical, (pair.truth_text, pair.answer_text))
    except OverLimit:
        return _Decision(False, "timeout", "over_limit", canonical)
    except Unreadable:
        return _Decision(False, "no_answer", "unreadable", canonical)
    several = answer.node.operation == "list" and answer.node.name == "" and truth.node.operation != "list"
    return _Decision(False, "ok", "several_values" if several else _rule_of(answer, truth), canonical)


def _words(answer: Reading, truth: Reading, *, bare: bool) -> _Decision:
    if truth.words is None:
        if answer.words is not None and (bare or truth.node is None):
            return _Decision(False, "no_answer", "unreadable")
        if answer.words is not None:
            return _Decision(False, "ok", "text", answer.words)
        # the truth is beyond the grammar or the limits
        return _undecided_text(answer.text, truth)
    found = {answer.words, *answer.also, normalised_words(answer.text)}
    return _Decision(truth.words in found, "ok", "text", answer.words or canonical_text(answer))


def _undecided_text(value: str, truth: Reading) -> _Decision:
    """An answer outside the grammar: the library may read it when it looks like mathematics, and nothing else may."""
    try:
        text = clean(value)
    except Unreadable:
        return _Decision(False, "no_answer", "unreadable")
    if _compact(text) == _compact(truth.text):
        return _Decision(True, "ok", "same_form", _shown(text))
    try:
        if not _for_library(text) or not _for_library(truth.text, needs_command=False):
            return _Decision(False, "no_answer", "unreadable")
        if _ENDLESS.search(text) and not _ENDLESS.search(truth.text):
            raise OverLimit("an answer that leaves a sum, product, integral or limit to the reader")
    except OverLimit:
        return _Decision(False, "timeout", "over_limit", _shown(text))
    return _Decision(False, "timeout", "undecided", open=(truth.text, text))


def _for_library(text: str, *, needs_command: bool = True) -> bool:
    """Whether a text may be handed to math-verify: LaTeX without prose, short, and with small numbers only.

    Raises:
        OverLimit: it may, but for a number so large that the library would try to compute with it for minutes.
    """
    if len(text) > 400 or (needs_command and "\\" not in text) or _NOT_FOR_LIBRARY.search(text) or text.count("^") > 8:
        return False
    if has_words(text):
        return False
    depth = deepest = 0
    for character in text:
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(character, 0)
        deepest = max(deepest, depth)
    if deepest > 12:
        return False
    if any(int(digits[:40]) > MAX_LIBRARY_LITERAL for digits in re.findall("[0-9]+", text)):
        raise OverLimit(f"a number above {MAX_LIBRARY_LITERAL} where only the library could compute")
    return True


def _from_worker(before: _Decision, outcome: Any) -> _Decision:
    if outcome == "timeout":
        return replace(before, status="timeout", rule="deadline", open=None)
    if outcome == "died":
        return replace(before, status="timeout", rule="worker_died", open=None)
    rule, decided = outcome["rule"], outcome["outcome"]
    if rule == "unreadable":
        return replace(before, status="no_answer", rule=rule, open=None)
    if decided is None:
        status: VerdictStatus = "timeout"
        return replace(before, status=status, rule="undecided" if rule in ("symbolic", "library") else rule, open=None)
    return replace(before, correct=decided, status="ok", rule=rule, open=None)


def _rule_of(answer: Reading, truth: Reading) -> str:
    for node in (answer.node, truth.node):
        if node is None or node.operation in ("list", "set_operation", "matrix", "relation"):
            return "structure"
    values = [_rational(reading) for reading in (answer, truth)]
    if any(value is None for value in values):
        return "exact"
    return "integer" if all(value is not None and value.denominator == 1 for value in values) else "rational"


def _rational(reading: Reading) -> Any:
    try:
        return None if reading.node is None else normal_form.evaluate(reading.node).rational
    except (Unreadable, OverLimit):
        return None


def canonical_text(reading: Reading) -> str:
    """Return the value for people: a fraction in lowest terms when it is rational, else the cleaned text."""
    value = None if reading.unit is not None and reading.unit.powers else _rational(reading)
    if value is None or max(value.numerator.bit_length(), value.denominator.bit_length()) > 600:
        return _shown(reading.text)
    return str(value)


def _readable(value: str) -> str:
    """The extracted text without typography, so that extracting it again gives the same."""
    try:
        return read_answer(value).text
    except (Unreadable, OverLimit):
        return value.strip()


def _compact(text: str) -> str:
    """Leave out blanks that mean nothing; those between digits or letters stay (`3 4` is not 34)."""
    return _MEANINGLESS_BLANK.sub("", text)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"

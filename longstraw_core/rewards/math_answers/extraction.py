"""Finds the final answer of a response: which stretch of text states it; must not know what the text is worth.

The last statement after the thinking block decides. A statement is a labelled line (`Answer: …`, `Final answer:`,
`答案：`, `<answer>`) or a `\\boxed{…}`; the value of an empty label may stand on the lines after it. Statements with
nothing but connecting words between them state several values together. Without label and box, `the answer is …`
counts, and a text that is nothing but one short line is its own answer, so extracting twice gives the same. All
searches are linear.
"""

import re
from dataclasses import dataclass
from typing import Literal

from longstraw_core.rewards.math_answers.boxes import Box, find_boxes, stated_by
from longstraw_core.rewards.math_answers.limits import MAX_CANDIDATES

AnswerFormat = Literal["any", "label", "box"]

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<[|｜][^|｜<>\n]{1,48}[|｜]>|</?s>|<(?:eos|bos|pad|end_of_turn|end_of_text)>|\[/?INST\]")
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL_WORDS = ("nswer", "NSWER", "答案")
"""Searched for as plain text, which is many times faster than a pattern; `a` or `A` stands before the first two."""
_BEFORE = re.compile(r"(?:[Ff]inal|FINAL|最终)\s{0,4}$")
_COLON_AFTER = re.compile(r"[是为]?[*_`\s]{0,8}(?:\([^()\n]{0,40}\)[*_`\s]{0,4})?[:：][*_`]{0,4}~?(?:\s{0,2}\})?")
_HEADING_BEFORE = re.compile(r"(?:^|\n)[ \t]{0,8}[#*_]{1,6}[ \t]{0,4}$")
_HEADING_AFTER = re.compile(r"[ \t*_#]{0,8}(?=\n|$)")
_VERB_AFTER = re.compile(r"\s{1,4}(?:is|equals)(?![A-Za-z])\s{0,4}:?|[是为]")
_SENTENCE_END = re.compile(r"[.!?。]\s|\n")
_CONNECTING = re.compile(
    r"(?:[\s,;.:$*_`&|\-–—+/。，、；]|\\[()\[\],;!: ]|\\(?:quad|qquad|text\{\s*(?:or|and)\s*\})|\bor\b|\band\b|或|和)*",
    re.IGNORECASE,
)
_CONNECTED_CHARACTERS = 80
_BULLET = re.compile(r"[ \t]{0,8}(?:[-*•–][ \t]{1,4}|1[.)][ \t]{1,4})(?=\S)")
_LEADS_TO_NEXT = re.compile(
    r"[ *_`]{0,8}(?:\\text\{ ?)?(?:(?:the|my|our|so|thus|hence|final|correct) ){0,3}[ *_]{0,4}", re.IGNORECASE
)
_NEXT_BULLET = re.compile(r"[ \t]{0,8}(?:[-*•–]|[0-9]{1,2}[.)])[ \t]{1,4}(?=\S)")
_MARKS = " \t\r*_`>#-–—|"
_BLOCK_CHARACTERS = 2_400
"""Longest stretch that a label may own when its value spans lines."""


@dataclass(frozen=True)
class FinalAnswer:
    """The stated values, in order; none when the last statement is empty or there is no statement."""

    values: tuple[str, ...]
    rule: str
    """Which rule found them (`label`, `box`, `whole_text`) or why there is none."""


@dataclass(frozen=True)
class _Statement:
    start: int
    end: int
    values: tuple[str, ...]
    boxes: tuple[Box, ...]
    """If there are any, they state the values, and `values` is empty."""
    kind: str
    value_start: int = 0

    @property
    def empty(self) -> bool:
        return not self.values and not any((box.content or "").strip() for box in self.boxes)


def final_answer(response: str, answer_format: AnswerFormat = "any") -> FinalAnswer:
    """Return what the response states as its final answer."""
    text = _after_thinking(response)
    if text is None:
        return FinalAnswer((), "unclosed_think")
    if any(mark in text for mark in ("<|", "<｜", "</s>", "<s>", "<e", "<b", "<p", "[INST", "[/INST")):
        text = _SPECIAL_TOKEN.sub("\n", text)
    if answer_format != "box":
        text = _tags_as_labels(text)
    boxes = find_boxes(text)
    statements: list[_Statement] = []
    if answer_format != "box":
        statements += _labelled(text, boxes, _labels(text, soft=False))
    if answer_format != "label":
        owned = [(statement.start, statement.end) for statement in statements]
        statements += _free_boxes(boxes, owned)
    if answer_format == "any" and not statements:
        statements = _labelled(text, boxes, _labels(text, soft=True))
    if not statements:
        line = text.strip()
        if answer_format == "any" and line and "\n" not in line:
            return FinalAnswer((line,), "whole_text")
        return FinalAnswer((), "no_statement")
    statements.sort(key=lambda statement: statement.start)
    last = statements[-1]
    if last.empty:
        return FinalAnswer((), "unclosed_box" if last.kind == "unclosed_box" else "empty_statement")
    first = len(statements) - 1
    while first and not statements[first - 1].empty and len(statements) - first <= MAX_CANDIDATES:
        if not _together(text, statements[first - 1], statements[first]):
            break
        first -= 1
    values: list[str] = []
    end = statements[first - 1].end if first else 0
    for statement in statements[first:]:
        found, end = _values(text, statement, end)
        values += found
    return FinalAnswer(tuple(dict.fromkeys(values)), last.kind)


def _after_thinking(response: str) -> str | None:
    if "think" not in response and "THINK" not in response and "Think" not in response:
        return response
    marks = list(_THINK.finditer(response))
    if not marks:
        return response
    return response[marks[-1].end() :] if marks[-1][1] else None


def _tags_as_labels(text: str) -> str:
    """Write `<answer>…</answer>`, closed or cut off, as a labelled line; a tag that another one follows is prose."""
    if "<a" not in text and "<A" not in text:
        return text
    first, *rest = _ANSWER_TAG.split(text)
    written = [first]
    for place in range(0, len(rest), 2):
        closing, content = rest[place], rest[place + 1]
        if closing:
            written += ["\n", content]
        elif place + 2 == len(rest) or rest[place + 2]:
            written += ["\nAnswer: ", content if content.strip() else "\\boxed{}"]
        else:
            written.append(content)
    return "".join(written)


def _values(text: str, statement: _Statement, first: int) -> tuple[list[str], int]:
    """Return what a statement states, its boxes with the expressions around them from `first` on; and where it ends."""
    if not statement.boxes:
        return list(statement.values), statement.end
    values: list[str] = []
    first, last = (statement.value_start, statement.end) if statement.kind == "label" else (first, len(text))
    for box in statement.boxes:
        # a box before `first` is part of the expression of the box before it
        if box.start >= first and (box.content or "").strip():
            value, first = stated_by(text, box, first, last)
            values.append(value)
    return values, first


def _free_boxes(boxes: list[Box], owned: list[tuple[int, int]]) -> list[_Statement]:
    statements: list[_Statement] = []
    position = 0
    for box in boxes:
        while position < len(owned) and owned[position][1] <= box.start:
            position += 1
        if position < len(owned) and owned[position][0] <= box.start:
            continue
        statements.append(_Statement(box.start, box.end, (), (box,), "unclosed_box" if box.content is None else "box"))
    return statements


def _labels(text: str, *, soft: bool) -> list[tuple[int, int]]:
    """Where labels begin and end: `Answer:` and its kin, or with `soft` what reads `the answer is`."""
    found: list[tuple[int, int]] = []
    for word in _LABEL_WORDS:
        place = text.find(word)
        while place >= 0:
            start, end = place, place + len(word)
            place = text.find(word, end)
            if word != "答案":
                start -= 1
                if (
                    start < 0
                    or text[start] not in "aA"
                    or (start and text[start - 1].isascii() and text[start - 1].isalpha())
                ):
                    continue
                if end < len(text) and text[end].isascii() and text[end].isalpha():
                    continue
            before = _BEFORE.search(text, max(0, start - 12), start)
            start = before.start() if before else start
            after = (_VERB_AFTER if soft else _COLON_AFTER).match(text, end)
            if after is None and not soft and _HEADING_BEFORE.search(text, max(0, start - 24), start):
                after = _HEADING_AFTER.match(text, end)
            if after is not None:
                found.append((start, after.end()))
    found.sort()
    return found


def _labelled(text: str, boxes: list[Box], labels: list[tuple[int, int]]) -> list[_Statement]:
    statements: list[_Statement] = []
    position = 0
    for number, (label_start, label_end) in enumerate(labels):
        limit = labels[number + 1][0] if number + 1 < len(labels) else len(text)
        if limit < len(text) and _LEADS_TO_NEXT.fullmatch(text, label_end, limit):
            continue  # `Answer: the answer is: 5` is one statement
        start, end = _owned(text, label_end, limit)
        while position < len(boxes) and boxes[position].end <= label_end:
            position += 1
        if position < len(boxes) and boxes[position].content is not None and boxes[position].start < label_start:
            continue  # a label inside a box is part of what the box states
        inside: list[Box] = []
        following = position
        while following < len(boxes) and boxes[following].start < end:
            inside.append(boxes[following])
            following += 1
        if inside:
            end = max(end, inside[-1].end)
        unclosed = any(box.content is None for box in inside)
        values = () if inside else _line_values(text, label_end, start, end)
        kind = "unclosed_box" if unclosed else "label"
        statements.append(_Statement(label_start, end, values, () if unclosed else tuple(inside), kind, start))
    return statements


def _owned(text: str, start: int, limit: int) -> tuple[int, int]:
    """Return where the value of a label begins and ends: the rest of its line, or the first block after it."""
    line_end = _line_end(text, start, limit)
    while not text[start:line_end].strip(_MARKS) and line_end < limit:
        start = line_end + 1
        line_end = _line_end(text, start, limit)
    rest = text[start : min(limit, start + _BLOCK_CHARACTERS)]
    stripped = rest.lstrip(_MARKS)
    for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")):
        if stripped.startswith(opening):
            begin = len(rest) - len(stripped) + len(opening)
            close = rest.find(closing, begin)
            if close >= 0 and start + close >= line_end:
                return start, start + close + len(closing)
            break
    return start, line_end


def _line_end(text: str, start: int, limit: int) -> int:
    end = text.find("\n", start, limit)
    return limit if end < 0 else end


def _line_values(text: str, label_end: int, start: int, end: int) -> tuple[str, ...]:
    """The rest of the line; or the items, when a bullet list begins on a line below the label."""
    value = text[start:end].strip()
    if not value.strip(_MARKS + "$"):
        return ()
    if "\n" in text[label_end:start] and (bullet := _BULLET.match(text, start)):
        items = [text[bullet.end() : end].strip()]
        while len(items) <= MAX_CANDIDATES and (following := _NEXT_BULLET.match(text, end + 1)):
            end = _line_end(text, following.end(), len(text))
            items.append(text[following.end() : end].strip())
        return tuple(items)
    return (value,)


def _together(text: str, first: _Statement, second: _Statement) -> bool:
    """Whether two statements are one: same sentence for boxes, or nothing but connecting words between them."""
    between = text[first.end : second.start]
    if len(between) <= _CONNECTED_CHARACTERS and _CONNECTING.fullmatch(between):
        return True
    return first.kind == second.kind == "box" and len(between) <= 400 and not _SENTENCE_END.search(between)

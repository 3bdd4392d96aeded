"""Finds the final answer of a response: which stretch of text states it; must not know what the text is worth.

The last statement after the thinking block decides. A statement is a labelled line (`Answer: …`, `Final answer:`,
`答案：`) or a `\\boxed{…}`; the value of an empty label may stand on the lines after it. Statements with nothing but
connecting words between them state several values together. Without label and box, `the answer is …` counts, and a
text that is nothing but one short line is its own answer, so extracting twice gives the same. All searches are linear.
"""

import re
from dataclasses import dataclass
from typing import Literal

from longstraw_core.rewards.math_answers.limits import MAX_CANDIDATES

AnswerFormat = Literal["any", "label", "box"]

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<[|｜][^|｜<>\n]{1,48}[|｜]>|</?s>|<(?:eos|bos|pad|end_of_turn|end_of_text)>|\[/?INST\]")
_LABEL_WORDS = ("nswer", "NSWER", "答案")
"""Searched for as plain text, which is many times faster than a pattern; `a` or `A` stands before the first two."""
_BEFORE = re.compile(r"(?:[Ff]inal|FINAL|最终)\s{0,4}$")
_COLON_AFTER = re.compile(r"[*_`\s]{0,8}(?:\([^()\n]{0,40}\)[*_`\s]{0,4})?[:：][*_`]{0,4}")
_HEADING_BEFORE = re.compile(r"(?:^|\n)[ \t]{0,8}[#*_]{1,6}[ \t]{0,4}$")
_HEADING_AFTER = re.compile(r"[ \t*_#]{0,8}(?=\n|$)")
_VERB_AFTER = re.compile(r"\s{1,4}(?:is|equals)(?![A-Za-z])\s{0,4}:?|[是为]")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|\\[\\{}]|[{}]")
_PERCENT_AFTER = re.compile(r"\s{0,4}\\?%")
_SENTENCE_END = re.compile(r"[.!?。]\s|\n")
_CONNECTING = re.compile(
    r"(?:[\s,;.:$*_`&|\-–—+/。，、；]|\\[()\[\],;!: ]|\\(?:quad|qquad|text\{\s*(?:or|and)\s*\})|\bor\b|\band\b|或|和)*",
    re.IGNORECASE,
)
_CONNECTED_CHARACTERS = 80
_HEDGE = re.compile(r"\bor\b|\band\b|[,;或和]", re.IGNORECASE)
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
class _Box:
    start: int
    end: int
    content: str | None
    """None: the braces never close."""


@dataclass(frozen=True)
class _Statement:
    start: int
    end: int
    values: tuple[str, ...]
    kind: str


def final_answer(response: str, answer_format: AnswerFormat = "any") -> FinalAnswer:
    """Return what the response states as its final answer."""
    text = _after_thinking(response)
    if text is None:
        return FinalAnswer((), "unclosed_think")
    if any(mark in text for mark in ("<|", "<｜", "</s>", "<s>", "<e", "<b", "<p", "[INST", "[/INST")):
        text = _SPECIAL_TOKEN.sub("\n", text)
    boxes = _boxes(text)
    statements: list[_Statement] = []
    if answer_format != "box":
        statements += _labelled(text, boxes, _labels(text, soft=False))
    if answer_format != "label":
        owned = [(statement.start, statement.end) for statement in statements]
        statements += _free_boxes(boxes, owned, text)
    if answer_format == "any" and not statements:
        statements = _labelled(text, boxes, _labels(text, soft=True))
    if not statements:
        line = text.strip()
        if answer_format == "any" and line and "\n" not in line:
            return FinalAnswer((line,), "whole_text")
        return FinalAnswer((), "no_statement")
    statements.sort(key=lambda statement: statement.start)
    last = statements[-1]
    if not last.values:
        return FinalAnswer((), "unclosed_box" if last.kind == "unclosed_box" else "empty_statement")
    values = list(last.values)
    following = last
    for statement in reversed(statements[:-1]):
        if not statement.values or len(values) > MAX_CANDIDATES or not _together(text, statement, following):
            break
        values[:0] = statement.values
        following = statement
    return FinalAnswer(tuple(dict.fromkeys(values)), last.kind)


def _after_thinking(response: str) -> str | None:
    if "think" not in response and "THINK" not in response and "Think" not in response:
        return response
    marks = list(_THINK.finditer(response))
    if not marks:
        return response
    return response[marks[-1].end() :] if marks[-1][1] else None


def _boxes(text: str) -> list[_Box]:
    """Every outermost `\\boxed{…}`, braces matched in one pass."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    stack: list[re.Match[str]] = []
    found: list[_Box] = []
    for mark in _BRACE.finditer(text):
        if mark[0] == "}":
            if stack and (opening := stack.pop())[0] != "{":
                content = text[opening.end() : mark.start()]
                if percent := _PERCENT_AFTER.match(text, mark.end()):
                    content += "\\%"
                found.append(_Box(opening.start(), percent.end() if percent else mark.end(), content))
        elif mark[0].endswith("{") and mark[0] != "\\{":
            stack.append(mark)
    found += [_Box(opening.start(), opening.end(), None) for opening in stack if opening[0] != "{"]
    found.sort(key=lambda box: box.start)
    outermost: list[_Box] = []
    for box in found:
        if not outermost or box.start >= outermost[-1].end:
            outermost.append(box)
    return outermost


def _free_boxes(boxes: list[_Box], owned: list[tuple[int, int]], text: str) -> list[_Statement]:
    statements: list[_Statement] = []
    position = 0
    for box in boxes:
        while position < len(owned) and owned[position][1] <= box.start:
            position += 1
        if position < len(owned) and owned[position][0] <= box.start:
            continue
        if box.content is None:
            statements.append(_Statement(box.start, box.end, (), "unclosed_box"))
        else:
            values = (box.content,) if box.content.strip() else ()
            statements.append(_Statement(box.start, box.end, values, "box"))
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


def _labelled(text: str, boxes: list[_Box], labels: list[tuple[int, int]]) -> list[_Statement]:
    statements: list[_Statement] = []
    position = 0
    for number, (label_start, label_end) in enumerate(labels):
        limit = labels[number + 1][0] if number + 1 < len(labels) else len(text)
        start, end = _owned(text, label_end, limit)
        while position < len(boxes) and boxes[position].start < label_end:
            position += 1
        inside: list[_Box] = []
        following = position
        while following < len(boxes) and boxes[following].start < end:
            inside.append(boxes[following])
            following += 1
        if inside:
            end = max(end, inside[-1].end)
        if any(box.content is None for box in inside):
            statements.append(_Statement(label_start, end, (), "unclosed_box"))
            continue
        statements.append(_Statement(label_start, end, _line_values(text, start, end, inside), "label"))
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


def _line_values(text: str, start: int, end: int, inside: list[_Box]) -> tuple[str, ...]:
    if not inside:
        value = text[start:end].strip()
        return (value,) if value.strip(_MARKS + "$") else ()
    contents = tuple(box.content for box in inside if box.content is not None and box.content.strip())
    if len(inside) != 1 or not contents:
        return contents
    box = inside[0]
    before, after = text[start : box.start], text[box.end : end]
    if any(_HEDGE.search(part) and re.search("[0-9]", part) for part in (before, after)):
        return (before, contents[0], after) if before.strip() else (contents[0], after)
    return contents


def _together(text: str, first: _Statement, second: _Statement) -> bool:
    """Whether two statements are one: same sentence for boxes, or nothing but connecting words between them."""
    between = text[first.end : second.start]
    if len(between) <= _CONNECTED_CHARACTERS and _CONNECTING.fullmatch(between):
        return True
    return first.kind == second.kind == "box" and len(between) <= 400 and not _SENTENCE_END.search(between)

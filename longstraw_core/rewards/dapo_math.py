"""The published DAPO math reward, reproduced bit for bit: +1 or −1 by exact text after a fixed normalisation.

Two variants, named in the specification and in every score:

* `label` is the form of 2025: the last `Answer:` in the last 300 characters, normalised, compared with the
  normalised ground truth. (verl added a fallback to boxes in August 2026; that is another rule.)
* `strict_box` is the last balanced box in the last 100 characters, compared without normalisation.

The rule's known mistakes (it drops the commas of `1, 2`, reads only the first `$...$`, refuses `12.0`) are part of
it and are kept. Only one thing is not: an answer key that normalises to nothing would pay +1 for an empty answer,
so it is reported as `bad_row`. Every step is linear in the length of its input, also on hostile text.
"""

import re
from typing import Literal

from longstraw_core.rewards.verdict import Verdict

Variant = Literal["label", "strict_box"]

RESPONSE_WINDOW = 300
BOX_WINDOW = 100
NO_ANSWER = "[INVALID]"
"""What the published rule compares with the ground truth when it finds no answer."""

BOX_OPEN = r"\boxed{"
ANSWER_LABEL = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

REWRITES = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""Replacements made first, each over the whole text, in this order."""

DROPPED_WORDS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    r"\ldots",
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Texts removed next, in this order; the order matters (removing one can create another)."""

SHORT_FRACTION = re.compile(r"frac([^{])(.)")
SHORT_ROOT = re.compile(r"sqrt([^{])")


def score_response(response: str, ground_truth: str, variant: Variant) -> Verdict:
    """Score one response: reward +1 when the published rule accepts it, −1 otherwise."""
    rule = f"dapo_math:{variant}"
    if truth_problem(ground_truth, variant) is not None:
        return Verdict(reward=-1.0, correct=False, status="bad_row", extracted=None, rule=rule)
    tail = response[-RESPONSE_WINDOW:]
    if variant == "label":
        labelled = _last_labelled(tail)
        extracted = None if labelled is None else normalize_answer(labelled)
        expected = normalize_answer(ground_truth)
    else:
        extracted = _last_boxed(tail[-BOX_WINDOW:])
        expected = ground_truth
    correct = (NO_ANSWER if extracted is None else extracted) == expected
    return Verdict(
        reward=1.0 if correct else -1.0,
        correct=correct,
        status="no_answer" if extracted is None else "ok",
        extracted=extracted,
        rule=rule,
    )


def truth_problem(ground_truth: str, variant: Variant) -> str | None:
    """Say why no response could honestly match `ground_truth`, or None when it is usable."""
    compared = normalize_answer(ground_truth) if variant == "label" else ground_truth
    if not compared.strip():
        return "is empty after normalisation, so an empty answer would be rewarded"
    if compared == NO_ANSWER:
        return f"is {NO_ANSWER}, the rule's own mark for a response without an answer"
    return None


def normalize_answer(answer: str) -> str:
    """Return the published rule's normal form of an answer or ground truth."""
    text = answer[answer.rfind("=") + 1 :]
    for old, new in REWRITES:
        text = text.replace(old, new)
    for word in DROPPED_WORDS:
        text = text.replace(word, "")
    text = "\n".join(_unwrap_line(line) for line in text.split("\n"))
    text = SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = SHORT_ROOT.sub(r"sqrt{\1}", text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    if without_commas.isdigit():
        text = without_commas
    return text.strip()


def _unwrap_line(line: str) -> str:
    """Keep only the first `$...$` of a line, then take the wrapping commands off."""
    opening = line.find("$")
    closing = line.find("$", opening + 1) if opening >= 0 else -1
    if closing >= 0:
        line = line[opening : closing + 1]
    for command in (r"\text{", r"\textbf{", r"\overline{"):
        line = _unwrap_to_first_brace(line, command)
    box = line.find(BOX_OPEN)
    last_brace = line.rfind("}")
    if box >= 0 and last_brace >= box + len(BOX_OPEN):
        line = line[:box] + line[box + len(BOX_OPEN) : last_brace] + line[last_brace + 1 :]
    return line


def _unwrap_to_first_brace(line: str, command: str) -> str:
    """Replace every `command...}` by what is between, up to the first closing brace, without nesting."""
    kept: list[str] = []
    position = 0
    while (start := line.find(command, position)) >= 0:
        inside = start + len(command)
        end = line.find("}", inside)
        if end < 0:
            break
        kept += (line[position:start], line[inside:end])
        position = end + 1
    kept.append(line[position:])
    return "".join(kept)


def _last_labelled(tail: str) -> str | None:
    last = None
    for match in ANSWER_LABEL.finditer(tail):
        last = match[1]
    return last


def _last_boxed(tail: str) -> str | None:
    """Return the content of the last `\\boxed{`, or None when there is none or its braces never close."""
    start = tail.rfind(BOX_OPEN)
    if start < 0:
        return None
    inside = start + len(BOX_OPEN)
    depth = 1
    for position in range(inside, len(tail)):
        depth += {"{": 1, "}": -1}.get(tail[position], 0)
        if depth == 0:
            return tail[inside:position]
    return None

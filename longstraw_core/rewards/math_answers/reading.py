"""From the text of an answer to one value: tries the whole text first, then without a remark, a lead-in or a unit."""

import re
from dataclasses import dataclass

from longstraw_core.rewards.math_answers.expression import Node
from longstraw_core.rewards.math_answers.limits import Unreadable
from longstraw_core.rewards.math_answers.parser import parse_value
from longstraw_core.rewards.math_answers.tokens import clean

_UNITS = (
    "mm cm dm km m in ft yd mi mg kg g t s ms min h hr hrs d wk yr ml mL cl L l N J kJ W kW V A Hz Pa K mol rad deg "
    "st nd rd th mph kmh kph USD EUR pts"
)
_UNIT = rf"(?:{'|'.join(sorted(_UNITS.split(), key=len, reverse=True))})"
_POWER = r"(?: ?\^ ?\{?[23]\}?|[23])?"
_WORD = r"[A-Za-z][A-Za-z'\-]{2,30}"
_UNIT_TAIL = re.compile(
    rf"(?<=[0-9)}}\]]) ?{_UNIT}{_POWER}(?: ?/ ?{_UNIT}{_POWER})?$"
    r"|(?<=[0-9A-Za-z)}\]]) ?°(?: ?[CF])?$"
    rf"|(?<=[0-9A-Za-z)}}\]%°]) (?:{_UNIT}|of|{_WORD}){_POWER}(?: ?/ ?{_UNIT}{_POWER})?"
    rf"(?: (?:{_UNIT}|of|per|in|on|at|a|an|to|{_WORD}){_POWER}){{0,4}}$"
)
_UNIT_HEAD = re.compile(r"^(?:US|USD|EUR|Rs\.?) ?(?=[0-9])")
_CONTRADICTS = re.compile(
    r"\b(?:not|no|never|neither|nor|isn't|wrong|incorrect|maybe|perhaps|possibly|alternatively|either|or|and|but|instead"
    r"|actually|unless|however|except|impossible|cannot|approximately|about|roughly|almost|more|less|fewer|least|most"
    r"|over|under|than|times|plus|minus|squared|cubed|hundred|thousand|million|billion|percent|half|import|lambda|eval"
    r"|exec|print|true|false|none)\b",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r" ?\((?=[^()]{0,200}[A-Za-z]{3})(?!\\)|[,;:] (?=[A-Za-z]{2,}|i\.e)|\. (?=\S)|"
    r" (?:since|because|as|which|where|so|when|hence|thus|if|after|from|by|for|with|--?) |\\because|✓|✔"
    r"|■|□|\\blacksquare|\\square"
)
_LEAD_IN = re.compile(r"^[A-Za-z][A-Za-z ,'\-]{0,120}?(?: (?:is|are|equals|be|gives)|:| ?=)(?: exactly)?:? +(?=\S)")
_NO_TRUTHS = frozenset(("nan", "null", "n/a", "na", "tbd", "todo", "unknown"))
_WORDS_ONLY = re.compile(r"\(?[A-Za-z][A-Za-z'\- ]{0,80}\)?")


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as text and as value; `node` is None for words such as `even`."""

    text: str
    """Without typography, remark and lead-in."""
    node: Node | None
    unit: bool = False
    """Whether a unit, or a counted noun, was left out."""

    @property
    def words(self) -> str | None:
        """The words, when the whole answer is words."""
        return self.text.strip("()").casefold() if _WORDS_ONLY.fullmatch(self.text) else None


def read_answer(text: str) -> Reading:
    """Read what a response states; remarks and lead-ins are allowed around the value.

    Raises:
        Unreadable: no single value is stated.
        OverLimit: a number is too large to read.
    """
    cleaned = clean(text)
    if not cleaned:
        raise Unreadable("nothing is stated")
    problem: Unreadable | None = None
    for candidate in _candidates(cleaned):
        try:
            return Reading(candidate, parse_value(candidate))
        except Unreadable as error:
            problem = problem or error
        try:
            bare = without_unit(candidate)
            if bare is not None:
                return bare
        except Unreadable:
            pass
    if _WORDS_ONLY.fullmatch(cleaned):
        return Reading(cleaned, None)
    raise problem or Unreadable("nothing is stated")


def read_truth(text: str) -> Reading:
    """Read a ground truth: one value, with or without a unit, or words.

    Raises:
        Unreadable: it is neither.
        OverLimit: a number is too large to read.
    """
    cleaned = clean(text)
    if not cleaned:
        raise Unreadable("is empty")
    if cleaned.casefold() in _NO_TRUTHS:
        raise Unreadable("is a mark for a missing value")
    try:
        return Reading(cleaned, parse_value(cleaned))
    except Unreadable:
        bare = without_unit(cleaned)
        if bare is not None:
            return bare
        if _WORDS_ONLY.fullmatch(cleaned):
            return Reading(cleaned, None)
        raise


def without_unit(text: str) -> Reading | None:
    """Read cleaned text without its unit or counted noun; None when it has none.

    Raises:
        Unreadable: what is left is no value.
    """
    head = _UNIT_HEAD.sub("", text)
    tail = _UNIT_TAIL.search(head)
    if tail is not None and _CONTRADICTS.search(tail[0]):
        return None
    bare = head[: tail.start()].rstrip() if tail is not None else head
    if bare == text or not bare:
        return None
    return Reading(bare, parse_value(bare), unit=True)


def _candidates(text: str) -> list[str]:
    """The text, then without lead-in, then without remark, then without both."""
    found = [text]
    lead = _LEAD_IN.match(text)
    bodies = [text]
    if lead is not None and not _CONTRADICTS.search(lead[0]):
        bodies.append(text[lead.end() :])
    if text.startswith(("= ", "=", "\\approx")):
        bodies.append(re.sub(r"^(?:=|\\approx)\s*", "", text))
    for body in bodies:
        found.append(body)
        for remark in list(_REMARK.finditer(body))[:4]:
            if remark.start() and not _hedges(body[remark.start() :]):
                found.append(body[: remark.start()].rstrip(" ,;:."))
    return list(dict.fromkeys(candidate for candidate in found if candidate))


def _hedges(remark: str) -> bool:
    """Whether a remark may state another value: numbers together with a word that takes the answer back."""
    return bool(_CONTRADICTS.search(remark)) and bool(re.search("[0-9]", remark))

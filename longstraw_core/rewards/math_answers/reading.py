"""From the text of an answer to one value: as it stands, without a lead-in or a remark, with its unit apart."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from longstraw_core.rewards.math_answers import normal_form, remarks
from longstraw_core.rewards.math_answers.cleaning import clean
from longstraw_core.rewards.math_answers.comparison import same_answer
from longstraw_core.rewards.math_answers.expression import Node
from longstraw_core.rewards.math_answers.limits import OverLimit, Unreadable
from longstraw_core.rewards.math_answers.parser import parse_value
from longstraw_core.rewards.math_answers.tokens import WORD_COMMANDS
from longstraw_core.rewards.math_answers.units import CLOCK, NEUTRAL, PHRASE, Unit, parse_unit
from longstraw_core.rewards.math_answers.words import are_words, as_set, normalised_words, spoken_mathematics

_COMMANDS = frozenset(WORD_COMMANDS)
_UNIT_PLACE = re.compile(r"(?<=[0-9)}\]!%|])(?P<space> ?)(?=[A-Za-z°])|(?<=[A-Za-z])(?P<blank> )(?=[A-Za-z°])")
_TWICE = re.compile(r"([0-9]+) \(\1\)")
"""`five (5)` is five, and no product."""
_TAKES_DEGREES = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis)(?![A-Za-z])")
_NO_TRUTHS = frozenset(("nan", "null", "n/a", "na", "tbd", "todo", "unknown"))
_MARKS_OF_TEXT = re.compile(r"\\(?![;, ])|[{}^_=<>$]")
MAX_REMARKS = 6


class StatesAnother(Unreadable):
    """Beside the value stands something that may be another value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as text and as value."""

    text: str
    """Without typography, remark and lead-in."""
    node: Node | None
    """None for words such as `even`, and for values beyond the grammar or the limits."""
    source: str = ""
    """The text that parses to `node`: spoken numbers written out, without the unit."""
    unit: Unit | None = None
    """The unit or counted noun that stood after the value."""
    product: Node | None = None
    """The whole as a product of variables, when its unit may as well be one (`5 m`)."""
    words: str | None = None
    """The normalised words, when the whole answer is words."""
    also: tuple[str, ...] = ()
    """The normalised words without lead-in or remark."""
    approximate: bool = False
    choice: str | None = None
    """The letter of a multiple-choice answer that stood before the value."""


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
    words: list[Reading] = []
    for body in remarks.bodies(cleaned):
        try:
            for reading in _readings(body):
                if reading.words is None:
                    return replace(reading, also=_texts(words))
                words.append(reading)
        except StatesAnother:
            raise
        except Unreadable as error:
            problem = problem or error
    if words:
        return replace(words[0], also=_texts(words))
    raise problem or Unreadable("nothing is stated")


def _readings(body: str) -> Iterator[Reading]:
    """Read a text as it stands, and without a remark if that fails or gives words.

    Raises:
        StatesAnother: the remark may be another value.
        Unreadable: there is no value, after everything that could be read.
    """
    problem: Unreadable | None = None
    try:
        yield _with_choice(body)
    except Unreadable as error:
        problem = error
    for remark in list(remarks.REMARK.finditer(body))[:MAX_REMARKS]:
        value = body[: remark.start()].rstrip(" ,;:.")
        try:
            reading = _with_choice(value) if value else None
        except Unreadable:
            continue
        if reading is not None:
            after = body[remark.start() :]
            words = reading.words is not None
            if remarks.may_be_left_out(after, _rational(reading), _test_of(reading), words=words):
                yield reading
            elif reading.words is None:
                raise StatesAnother("what follows the value may state another one")
            return
    if problem is not None:
        raise problem


def _texts(readings: list[Reading]) -> tuple[str, ...]:
    return tuple(reading.words for reading in readings if reading.words is not None)


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
        return _with_choice(cleaned)
    except Unreadable:
        # a date, a name with a number: text that only the same text equals
        if re.search("[A-Za-z]{3}", cleaned) and not _MARKS_OF_TEXT.search(cleaned):
            return Reading(cleaned, None, words=normalised_words(cleaned))
        raise


def _with_choice(text: str) -> Reading:
    """Read one value, with the letter of a choice before it or without."""
    if (letter := remarks.CHOICE.match(text)) is not None:
        name = letter[1] or letter[2] or letter[3]
        rest = text[letter.end() :]
        if not rest:
            return replace(_read(name), text=text, choice=name)
        return replace(_read(rest), text=text, choice=name)
    return _read(text)


def _read(text: str) -> Reading:
    approximate = remarks.APPROXIMATE.match(text)
    body = text[approximate.end() :] if approximate else text
    if after := remarks.APPROXIMATE_AFTER.search(body):
        body = body[: after.start()]
    reading = _exact(body)
    node = reading.node
    if node is not None and node.operation == "relation" and node.name.split(" ")[-1] == "\\approx":
        *before, last = node.parts
        if all(part.operation == "symbol" for part in before):
            source = reading.source.rpartition("\\approx")[2]
            return replace(reading, text=text, node=last, source=source, approximate=True)
    if approximate or after:
        return replace(reading, text=text, approximate=True)
    return reading if reading.text == text else replace(reading, text=text)


def _exact(text: str) -> Reading:
    named = as_set(text)
    if named is not None:
        return Reading(text, parse_value(named), named)
    if remarks.ends_in_a_remark(text):
        raise Unreadable("a remark in brackets")
    spoken = spoken_mathematics(text)
    if (twice := _TWICE.fullmatch(spoken)) is not None:
        spoken = twice[1]
    if are_words(spoken, _COMMANDS):
        return Reading(text, None, words=normalised_words(text))
    with_unit = _value_and_unit(spoken)
    try:
        whole = parse_value(spoken)
    except Unreadable:
        if with_unit is None:
            raise
        return with_unit
    if with_unit is None or with_unit.unit is None:
        return Reading(text, whole, spoken)
    if not with_unit.unit.powers:
        certain = with_unit.unit.noun <= NEUTRAL or (with_unit.unit.noun <= CLOCK and ":" in with_unit.source)
        return with_unit if certain else Reading(text, whole, spoken)
    return replace(with_unit, product=whole)


def _value_and_unit(text: str) -> Reading | None:
    """Take the unit or the counted noun off the end; None when there is none."""
    if not re.search(r"[A-Za-z°]", text[-40:]):
        return None
    for place in list(_UNIT_PLACE.finditer(text))[:24]:
        phrase = text[place.end() :].rstrip(" .")
        if not PHRASE.fullmatch(phrase):
            continue
        unit = parse_unit(phrase, spaced=bool(place["space"] or place["blank"]))
        value = text[: place.start()]
        if unit is None or (unit.is_angle and _TAKES_DEGREES.search(value)) or (place["blank"] and not unit.powers):
            continue
        try:
            return Reading(text, parse_value(value), value, unit=unit)
        except Unreadable:
            continue
    return None


def _rational(reading: Reading) -> Fraction | None:
    try:
        return None if reading.node is None else normal_form.evaluate(reading.node).rational
    except (Unreadable, OverLimit):
        return None


def _test_of(reading: Reading) -> Callable[[str], bool]:
    """Return a test whether a text is the same value again."""

    def is_same(text: str) -> bool:
        if reading.node is None:
            return False
        try:
            other = _read(text)
            return other.node is not None and same_answer(reading.node, other.node) is True
        except (Unreadable, OverLimit):
            return False

    return is_same

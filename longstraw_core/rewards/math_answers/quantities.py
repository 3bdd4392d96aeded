"""Which two values are compared when an answer or a ground truth has a unit, is an angle, or names a choice."""

from dataclasses import dataclass
from fractions import Fraction

from longstraw_core.rewards.math_answers.expression import Node, number
from longstraw_core.rewards.math_answers.reading import Reading
from longstraw_core.rewards.math_answers.units import ratio

_HALF_TURN = Node("divide", (Node("symbol", name="\\pi"), number(180)))
_CHOICES = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two values and the texts that parse to them; one such pair being equal makes the answer right."""

    truth: Node
    answer: Node
    truth_text: str
    answer_text: str


def comparisons(truth: Reading, answer: Reading) -> list[Comparison]:
    """Return the values to compare; none when the units conflict.

    A unit that only the answer has is left out, and so is one that only the ground truth has, unless it is a letter
    that may be a variable. Two units must have the same dimensions; the answer is converted by the exact factor.
    """
    if truth.node is None or answer.node is None:
        return []
    written = Comparison(truth.node, answer.node, truth.source, answer.source)
    found: list[Comparison] = []
    if truth.unit is not None and answer.unit is not None:
        factor = ratio(truth.unit, answer.unit)
        if factor is not None:
            found.append(
                written
                if factor == 1
                else Comparison(
                    truth.node, _scaled(answer.node, number(factor)), truth.source, _times(answer.source, factor)
                )
            )
        elif truth.unit.is_angle and answer.unit.is_arc:
            found.append(_in_radians(truth, answer, of_truth=True))
        elif answer.unit.is_angle and truth.unit.is_arc:
            found.append(_in_radians(truth, answer, of_truth=False))
    elif truth.unit is None or not truth.unit.bare_letter:
        found.append(written)
        if answer.unit is not None and answer.unit.is_angle:
            found.append(_in_radians(truth, answer, of_truth=False))
        if truth.unit is not None and truth.unit.is_angle:
            found.append(_in_radians(truth, answer, of_truth=True))
    if truth.product is not None and answer.unit is None:
        found.append(Comparison(truth.product, answer.node, truth.text, answer.source))
    if answer.product is not None and truth.unit is None:
        found.append(Comparison(truth.node, answer.product, truth.source, answer.text))
    if truth.product is not None and answer.product is not None and truth.text[-1] == answer.text[-1]:
        found.append(Comparison(truth.product, answer.product, truth.text, answer.text))
    return found


def same_choice(truth: Reading, answer: Reading) -> bool:
    """Whether both name the same letter of a multiple choice: `B`, `(b)`, `B) 42`, `option B`."""
    wanted, stated = _choice(truth), _choice(answer)
    return wanted is not None and wanted == stated


def _choice(reading: Reading) -> str | None:
    if reading.choice is not None:
        return reading.choice
    node = reading.node
    if node is not None and node.operation == "symbol" and node.name.upper() in _CHOICES and len(node.name) == 1:
        return node.name.upper()
    return None


def _in_radians(truth: Reading, answer: Reading, *, of_truth: bool) -> Comparison:
    if truth.node is None or answer.node is None:
        raise AssertionError("only values have units")
    turn = Fraction(1, 180)
    if of_truth:
        return Comparison(
            _scaled(truth.node, _HALF_TURN), answer.node, _times(truth.source, turn) + "*\\pi", answer.source
        )
    return Comparison(truth.node, _scaled(answer.node, _HALF_TURN), truth.source, _times(answer.source, turn) + "*\\pi")


def _scaled(node: Node, factor: Node) -> Node:
    if node.operation in ("list", "relation"):
        names = node.parts[:-1] if node.operation == "relation" else ()
        return Node(node.operation, (*names, *(_scaled(part, factor) for part in node.parts[len(names) :])), node.name)
    return Node("multiply", (node, factor))


def _times(text: str, factor: Fraction) -> str:
    return f"({text})*{factor.numerator}/{factor.denominator}"

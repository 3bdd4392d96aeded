"""The syntax tree of one mathematical value; knows neither text nor arithmetic."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Operation = Literal[
    "number",  # value
    "symbol",  # name
    "add", "multiply", "divide", "negate", "power", "root", "factorial", "binomial", "plus_minus",
    "function",  # name
    "list",  # name: its brackets, one of "", "()", "[]", "(]", "[)", "{}"
    "set_operation",  # name: cup, cap, setminus
    "relation",  # name: the relation signs, separated by blanks
    "matrix",  # rows are lists
    "congruence",  # a value or a relation, and the modulus
    "set_builder",  # variable, domain, conditions
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One operation on its parts."""

    operation: Operation
    parts: tuple["Node", ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


INFINITY = Node("symbol", name="\\infty")
NUMBER_SETS = frozenset(("\\Reals", "\\Integers", "\\Naturals", "\\Rationals", "\\Complexes"))
"""Names of the standard sets of numbers."""
_CONSTANTS = frozenset(("\\pi", "e", "i", "\\infty", *NUMBER_SETS))


def number(value: int | Fraction) -> Node:
    """Return a literal."""
    return Node("number", value=Fraction(value))


def symbols_of(node: Node) -> frozenset[str]:
    """Return the names of all free symbols; constants such as π, e, i and ∞ are none."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        waiting.extend(current.parts)
        if current.operation == "symbol" and current.name not in _CONSTANTS:
            found.add(current.name)
    return frozenset(found)

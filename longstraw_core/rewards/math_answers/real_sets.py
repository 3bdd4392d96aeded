"""Sets of real numbers as sorted disjoint intervals, so that two ways to write one set become the same.

Only sets whose end points have a known order take part; everything else is compared piece by piece by the caller.
"""

import math
from dataclasses import dataclass
from functools import cmp_to_key

from longstraw_core.rewards.math_answers import normal_form
from longstraw_core.rewards.math_answers.expression import INFINITY, Node, symbols_of
from longstraw_core.rewards.math_answers.limits import MAX_VALUES, Unreadable

_CLOSE = 1e-9
"""End points nearer than this, relative to their size, have no known order unless they are equal."""


@dataclass(frozen=True, slots=True)
class _Point:
    size: float
    value: normal_form.Value | None
    """None: infinite."""


@dataclass(frozen=True, slots=True)
class _Piece:
    low: _Point
    low_closed: bool
    high: _Point
    high_closed: bool


_LOWEST = _Point(-math.inf, None)
_HIGHEST = _Point(math.inf, None)
_EVERYTHING = [_Piece(_LOWEST, False, _HIGHEST, False)]
RealSet = list[_Piece]


def real_set(node: Node) -> RealSet | None:
    """Return the set that an interval, a list of numbers, a relation or an operation on sets stands for, else None.

    Raises:
        OverLimit: an end point is larger than the limits.
    """
    try:
        return _set(node)
    except Unreadable:
        return None


def same_set(first: RealSet, second: RealSet) -> bool:
    """Whether two sets have the same elements."""
    return len(first) == len(second) and all(
        (left.low_closed, left.high_closed) == (right.low_closed, right.high_closed)
        and _order(left.low, right.low) == _order(left.high, right.high) == 0
        for left, right in zip(first, second, strict=True)
    )


def _set(node: Node) -> RealSet:
    if node.operation == "symbol" and node.name == "\\Reals":
        return _EVERYTHING
    if node.operation == "list" and node.name in ("()", "[]", "(]", "[)") and len(node.parts) == 2:
        low, high = (_point(part) for part in node.parts)
        order = _order(low, high)
        if order > 0 or (order == 0 and node.name != "[]"):
            raise Unreadable("an interval that ends before it begins")
        return [
            _Piece(
                low, node.name[0] == "[" and low.value is not None, high, node.name[1] == "]" and high.value is not None
            )
        ]
    if node.operation == "list" and node.name == "{}":
        points = [_point(part) for part in node.parts]
        if any(point.value is None for point in points):
            raise Unreadable("infinity as an element")
        return _merged([_Piece(point, True, point, True) for point in points])
    if node.operation == "list" and node.name == "" and all(part.operation == "relation" for part in node.parts):
        return _relations([_set(part) for part in node.parts])
    if node.operation == "relation":
        return _relation(node)
    if node.operation == "set_builder" and node.parts[1] == Node("symbol", name="\\Reals"):
        return _relations([_set(part) for part in node.parts[2:]])
    if node.operation == "set_operation":
        left, right = (_set(part) for part in node.parts)
        if node.name == "cup":
            return _merged(left + right)
        return _meeting(left, _complement(right) if node.name == "setminus" else right)
    if node.operation == "add" and len(node.parts) == 2 and node.parts[1].operation == "negate":
        # ℝ − {0}
        return _meeting(_set(node.parts[0]), _complement(_set(node.parts[1].parts[0])))
    raise Unreadable(f"{node.operation} is no set")


def _relations(sets: list[RealSet]) -> RealSet:
    """Conditions beside each other: all of them where they can hold together, else any of them."""
    together = _EVERYTHING
    for each in sets:
        together = _meeting(together, each)
    if together:
        return together
    return _merged([piece for each in sets for piece in each])


def _relation(node: Node) -> RealSet:
    signs, parts = node.name.split(" "), node.parts
    if signs == ["\\in"] and parts[0].operation == "symbol":
        return _set(parts[1])
    found = _EVERYTHING
    for sign, left, right in zip(signs, parts, parts[1:], strict=False):
        if left.operation == "symbol" and symbols_of(left) and not symbols_of(right):
            point = _point(right)
        elif right.operation == "symbol" and symbols_of(right) and not symbols_of(left):
            point, sign = _point(left), {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}.get(sign, sign)
        else:
            raise Unreadable("no condition on one variable")
        below, above = _Piece(_LOWEST, False, point, False), _Piece(point, False, _HIGHEST, False)
        closed = point.value is not None
        pieces = {
            "<": [below], ">": [above], "\\ne": [below, above], "=": [_Piece(point, closed, point, closed)],
            "\\le": [_Piece(_LOWEST, False, point, closed)], "\\ge": [_Piece(point, closed, _HIGHEST, False)],
        }.get(sign)  # fmt: skip
        if pieces is None:
            raise Unreadable(f"the relation {sign}")
        found = _meeting(found, pieces)
    return found


def _point(node: Node) -> _Point:
    if node == INFINITY:
        return _HIGHEST
    if node == Node("negate", (INFINITY,)):
        return _LOWEST
    value = normal_form.evaluate(node)
    return _Point(_size(value), value)


def _size(value: normal_form.Value) -> float:
    """Return an approximation that puts end points in order; never used to call two of them equal."""
    try:
        sizes = [_sum_of(part) for part in (value.top, value.bottom)]
    except OverflowError as error:
        raise Unreadable("an end point too large to place") from error
    if not all(map(math.isfinite, sizes)) or sizes[1] == 0:
        raise Unreadable("an end point without a known place")
    return sizes[0] / sizes[1]


def _sum_of(terms: normal_form.Sum) -> float:
    return math.fsum(
        float(coefficient) * math.prod(_generator(name) ** float(exponent) for name, exponent in monomial)
        for monomial, coefficient in terms.items()
    )


def _generator(name: str) -> float:
    if name in ("\\pi", "e"):
        return math.pi if name == "\\pi" else math.e
    if name.isdigit() and len(name) < 300:
        return float(name)
    raise Unreadable("an end point that is no known number")


def _order(first: _Point, second: _Point) -> int:
    if first.value is None or second.value is None:
        return (first.size > second.size) - (first.size < second.size)
    if abs(first.size - second.size) > _CLOSE * max(1.0, abs(first.size), abs(second.size)):
        return 1 if first.size > second.size else -1
    if normal_form.same_value(first.value, second.value):
        return 0
    exact = [point.value.rational for point in (first, second) if point.value is not None]
    if exact[0] is None or exact[1] is None:
        raise Unreadable("end points too close to put in order")
    return 1 if exact[0] > exact[1] else -1


def _start(first: _Piece, second: _Piece) -> int:
    return _order(first.low, second.low) or second.low_closed - first.low_closed


def _merged(pieces: list[_Piece]) -> RealSet:
    """Sort and join pieces that overlap or touch."""
    if len(pieces) > MAX_VALUES:
        raise Unreadable("too many pieces")
    found: RealSet = []
    for piece in sorted(pieces, key=cmp_to_key(_start)):
        if found:
            last = found[-1]
            order = _order(piece.low, last.high)
            if order < 0 or (order == 0 and (piece.low_closed or last.high_closed)):
                end = _order(piece.high, last.high) or piece.high_closed - last.high_closed
                if end > 0:
                    found[-1] = _Piece(last.low, last.low_closed, piece.high, piece.high_closed)
                continue
        found.append(piece)
    return found


def _complement(pieces: RealSet) -> RealSet:
    found: RealSet = []
    low, closed = _LOWEST, False
    for piece in pieces:
        if (order := _order(low, piece.low)) < 0 or (order == 0 and closed and not piece.low_closed):
            found.append(_Piece(low, closed, piece.low, not piece.low_closed and piece.low.value is not None))
        low, closed = piece.high, not piece.high_closed and piece.high.value is not None
    if low.size < math.inf:
        found.append(_Piece(low, closed, _HIGHEST, False))
    return found


def _meeting(first: RealSet, second: RealSet) -> RealSet:
    found: RealSet = []
    for left in first:
        for right in second:
            low, low_closed = _later(left, right)
            high, high_closed = _earlier(left, right)
            order = _order(low, high)
            if order < 0 or (order == 0 and low_closed and high_closed):
                found.append(_Piece(low, low_closed, high, high_closed))
    return _merged(found)


def _later(first: _Piece, second: _Piece) -> tuple[_Point, bool]:
    piece = first if _start(first, second) >= 0 else second
    return piece.low, piece.low_closed


def _earlier(first: _Piece, second: _Piece) -> tuple[_Point, bool]:
    order = _order(first.high, second.high) or first.high_closed - second.high_closed
    piece = first if order <= 0 else second
    return piece.high, piece.high_closed

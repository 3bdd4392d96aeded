"""Decides whether an answer is the ground truth: structure here, numbers by the function that is passed in.

Three outcomes: True, False, and None when the arithmetic cannot tell; None is never turned into a reward.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product as combinations

from longstraw_core.rewards.math_answers import normal_form
from longstraw_core.rewards.math_answers.expression import INFINITY, NUMBER_SETS, Node, number, symbols_of
from longstraw_core.rewards.math_answers.limits import MAX_VALUES, OverLimit, Unreadable
from longstraw_core.rewards.math_answers.real_sets import real_set, same_set

Outcome = bool | None
ScalarTest = Callable[[Node, Node], Outcome]


def exact_scalars(truth: Node, answer: Node) -> Outcome:
    """Compare two numbers by bounded exact arithmetic."""
    return normal_form.same_value(normal_form.evaluate(truth), normal_form.evaluate(answer))


def same_answer(truth: Node, answer: Node, same_scalar: ScalarTest = exact_scalars) -> Outcome:
    """Compare two values.

    Raises:
        Unreadable: the answer is no value after all (division by zero).
        OverLimit: a number is larger than the limits.
    """
    return _Comparison(same_scalar).same(truth, answer)


class _Comparison:
    def __init__(self, same_scalar: ScalarTest) -> None:
        self._same_scalar = same_scalar

    def same(self, truth: Node, answer: Node) -> Outcome:
        truth, answer = _expanded(truth), _expanded(answer)
        if "congruence" in (truth.operation, answer.operation):
            return self._congruences(truth, answer)
        if _needs_sets(truth) or _needs_sets(answer):
            outcome = _as_real_sets(truth, answer)
            if outcome is not None:
                return outcome
        if truth.operation == "relation" and answer.operation == "relation":
            return self._relations(truth, answer)
        if truth.operation == "relation":
            interval = _interval(truth)
            if interval is not None and _is_set(answer):
                return self.same(interval, answer)
            stripped = _unnamed(truth)
            return False if len(stripped) != 1 else self._plain(stripped[0], answer)
        if answer.operation == "relation":
            interval = _interval(answer)
            if interval is not None:
                return self.same(truth, interval) if _is_set(truth) else False
            stripped = _unnamed(answer)
            return bool(stripped) and _all(self._plain(truth, part) for part in stripped)
        return self._plain(truth, answer)

    def _plain(self, truth: Node, answer: Node) -> Outcome:
        truth, answer = _expanded(truth), _expanded(answer)
        if truth.name in NUMBER_SETS or answer.name in NUMBER_SETS:
            return truth == answer
        if truth.operation == "set_builder" or answer.operation == "set_builder":
            return self._same_parts(truth, answer)
        if truth.operation == "set_operation" or answer.operation == "set_operation":
            return self._set_operations(truth, answer)
        if truth.operation == "matrix" or answer.operation == "matrix":
            return self._matrices(truth, answer)
        if truth.operation == "list" or answer.operation == "list":
            return self._lists(truth, answer)
        if _infinite(truth) or _infinite(answer):
            return _infinite(truth) == _infinite(answer)
        return self._same_scalar(truth, answer)

    def _same_parts(self, truth: Node, answer: Node) -> Outcome:
        if truth.operation != answer.operation or len(truth.parts) != len(answer.parts):
            return False
        return _all(self.same(left, right) for left, right in zip(truth.parts, answer.parts, strict=True))

    def _congruences(self, truth: Node, answer: Node) -> Outcome:
        """Compare residues; one that is stated without its modulus must be the same number."""
        residues = [node.parts[0] if node.operation == "congruence" else node for node in (truth, answer)]
        if truth.operation != answer.operation:
            return self.same(residues[0], residues[1])
        if (same_modulus := self.same(truth.parts[1], answer.parts[1])) is not True:
            return same_modulus
        values = [_unnamed(node)[-1:] if node.operation == "relation" else (node,) for node in residues]
        if not (values[0] and values[1]):
            return False
        difference = Node("add", (values[0][0], Node("negate", (values[1][0],))))
        quotient = normal_form.evaluate(Node("divide", (difference, truth.parts[1]))).rational
        return quotient is not None and quotient.denominator == 1

    def _relations(self, truth: Node, answer: Node) -> Outcome:
        if truth.name == answer.name == "=" and len(truth.parts) == len(answer.parts) == 2:
            if truth.parts[0] == answer.parts[0]:
                return self.same(truth.parts[1], answer.parts[1])
            try:
                return normal_form.proportional(_difference(truth), _difference(answer))
            except Unreadable:
                pass
        if set(truth.name.split(" ")) | set(answer.name.split(" ")) <= {"<", ">", "\\le", "\\ge", "\\in"}:
            outcome = _as_real_sets(truth, answer)
            if outcome is not None:
                return outcome
        first, second = _interval(truth), _interval(answer)
        if first is not None and second is not None:
            return self.same(first, second)
        if len(truth.parts) != len(answer.parts):
            stripped = _unnamed(answer)
            if truth.name == "=":
                (*_, wanted) = truth.parts
                return bool(stripped) and _all(self.same(wanted, part) for part in stripped)
            return False
        if truth.name == answer.name:
            return _all(self.same(left, right) for left, right in zip(truth.parts, answer.parts, strict=True))
        return False

    def _lists(self, truth: Node, answer: Node) -> Outcome:
        truth, answer = _quotient(truth), _quotient(answer)
        if truth.operation != "list" and answer.operation != "list":
            return self._plain(truth, answer)
        if truth.operation != "list":
            # several values for one: right only if each of them is the one (`1/2, 0.5`)
            return (
                _all(self.same(truth, part) for part in answer.parts) if answer.name == "" and answer.parts else False
            )
        if answer.operation != "list":
            return _all(self.same(part, answer) for part in truth.parts) if truth.name == "" and truth.parts else False
        names = {truth.name, answer.name}
        if names == {":"}:
            return self._ratios(truth.parts, answer.parts)
        if "{}" in names:
            if not names <= {"{}", ""}:
                return False
            return _all((self._covered(truth.parts, answer.parts), self._covered(answer.parts, truth.parts, swap=True)))
        if len(truth.parts) != len(answer.parts):
            return False
        if names == {""}:
            return self._in_any_order(truth.parts, answer.parts)
        if len(names) == 2 and "" not in names:
            return False
        return _all(self.same(left, right) for left, right in zip(truth.parts, answer.parts, strict=True))

    def _ratios(self, truth: Sequence[Node], answer: Sequence[Node]) -> Outcome:
        """Compare `2:4:6` with `1:2:3`: cross products agree, and zeros stand in the same places."""
        if len(truth) != len(answer):
            return False
        pairs = list(zip(truth, answer, strict=True))
        for left, right in pairs:
            zeros = self.same(number(0), left), self.same(number(0), right)
            if zeros[0] != zeros[1]:
                return None if None in zeros else False
        return _all(
            self.same(Node("multiply", (left, other_right)), Node("multiply", (other_left, right)))
            for place, (left, right) in enumerate(pairs)
            for other_left, other_right in pairs[place + 1 :]
        )

    def _covered(self, first: Sequence[Node], second: Sequence[Node], *, swap: bool = False) -> Outcome:
        """Whether every element of `first` is in `second`."""
        return _all(
            _any(self.same(other, part) if swap else self.same(part, other) for other in second) for part in first
        )

    def _in_any_order(self, truth: Sequence[Node], answer: Sequence[Node]) -> Outcome:
        left = list(answer)
        unsure = False
        for part in truth:
            outcomes = [self.same(part, other) for other in left]
            if True in outcomes:
                del left[outcomes.index(True)]
            elif None in outcomes:
                unsure = True
                del left[outcomes.index(None)]
            else:
                return False
        return None if unsure else True

    def _set_operations(self, truth: Node, answer: Node) -> Outcome:
        truth, answer = _as_union(truth), _as_union(answer)
        if truth.operation != answer.operation or truth.name != answer.name:
            return False
        first, second = _pieces(truth), _pieces(answer)
        if len(first) != len(second):
            return False
        if truth.name == "setminus":
            return _all(self.same(left, right) for left, right in zip(first, second, strict=True))
        return self._in_any_order(first, second)

    def _matrices(self, truth: Node, answer: Node) -> Outcome:
        first, second = _rows(truth), _rows(answer)
        if first is None or second is None:
            return False
        if truth.operation != answer.operation:
            # a row or a column may be written as a tuple
            first, second = _line(first), _line(second)
        if [len(row) for row in first] != [len(row) for row in second]:
            return False
        return _all(
            self.same(left, right)
            for row, other in zip(first, second, strict=True)
            for left, right in zip(row, other, strict=True)
        )


def _all(outcomes: Iterable[Outcome]) -> Outcome:
    unsure = False
    for outcome in outcomes:
        if outcome is False:
            return False
        unsure = unsure or outcome is None
    return None if unsure else True


def _any(outcomes: Iterable[Outcome]) -> Outcome:
    unsure = False
    for outcome in outcomes:
        if outcome is True:
            return True
        unsure = unsure or outcome is None
    return None if unsure else False


def _expanded(node: Node) -> Node:
    """Write `±` as the list of values it stands for."""
    if node.operation == "list" and node.name in ("", "{}"):
        parts = [value for part in node.parts for value in _signs(part)]
        if len(parts) != len(node.parts):
            return Node("list", tuple(parts), node.name)
        return node
    if node.operation in ("list", "set_operation", "matrix"):
        return node
    values = _signs(node)
    return values[0] if len(values) == 1 else Node("list", tuple(values), "")


def _signs(node: Node) -> list[Node]:
    if not node.parts:
        return [node]
    choices = [_signs(part) for part in node.parts]
    count = 2 if node.operation == "plus_minus" else 1
    for choice in choices:
        count *= len(choice)
    if count > MAX_VALUES:
        raise OverLimit("± for too many values")
    if count == 1:
        return [node]
    found: list[Node] = []
    for parts in combinations(*choices):
        if node.operation == "plus_minus":
            left, right = parts
            found += [Node("add", (left, right)), Node("add", (left, Node("negate", (right,))))]
        else:
            found.append(Node(node.operation, tuple(parts), node.name, node.value))
    return found


def _difference(equation: Node) -> normal_form.Value:
    left, right = equation.parts
    return normal_form.evaluate(Node("add", (left, Node("negate", (right,)))))


def _unnamed(relation: Node) -> tuple[Node, ...]:
    """Drop the name from `x = 5` or `f(x) = 5`; every part that is left must be the value."""
    signs, parts = relation.name.split(" "), list(relation.parts)
    if "\\approx" in signs:
        parts = parts[: signs.index("\\approx") + 1]
    if set(signs) - {"=", "\\in", "\\approx"}:
        return (relation,)
    values = [part for part in parts if not _is_bare_name(part)]
    if set(signs) == {"="} and values and not any(symbols_of(part) for part in values):
        return tuple(values)  # `5 = x`, `x = y = 5`
    if len(parts) > 1 and (_is_name(parts[0]) or (symbols_of(parts[0]) and _states_constant(parts))):
        parts = parts[1:]
    return tuple(parts)


def _quotient(node: Node) -> Node:
    """Write the ratio `3:4` as the quotient that it is."""
    return (
        Node("divide", node.parts) if node.operation == "list" and node.name == ":" and len(node.parts) == 2 else node
    )


def _needs_sets(node: Node) -> bool:
    """Whether a node is a set that has several notations."""
    if node.operation == "relation":
        return "\\ne" in node.name.split(" ") or ("\\in" in node.name.split(" ") and _needs_sets(node.parts[-1]))
    if node.operation == "list" and node.name == "" and node.parts:
        return all(part.operation == "relation" for part in node.parts) and any(
            set(part.name.split(" ")) - {"="} for part in node.parts
        )
    return node.operation in ("set_operation", "set_builder") or node.name == "\\Reals"


def _as_real_sets(truth: Node, answer: Node) -> Outcome:
    try:
        first, second = real_set(truth), real_set(answer)
        return None if first is None or second is None else same_set(first, second)
    except Unreadable:
        return None


def _is_bare_name(node: Node) -> bool:
    return bool(symbols_of(node)) if node.operation == "symbol" else node.name.startswith("call ")


def _is_name(node: Node) -> bool:
    if node.operation == "symbol":
        return bool(symbols_of(node)) or node.name in ("e", "i")
    if node.operation == "function":
        return node.name.startswith("call ") or (node.name == "abs" and bool(symbols_of(node)))
    return node.operation in ("add", "multiply") and all(
        bool(symbols_of(part)) and part.operation == "symbol" for part in node.parts
    )


def _states_constant(parts: list[Node]) -> bool:
    """Whether `expression = constant` states that constant; `… = 0` is an equation, not the value 0."""
    return not any(symbols_of(part) for part in parts[1:]) and not any(
        part.operation == "number" and part.value == 0 for part in parts[1:]
    )


def _interval(relation: Node) -> Node | None:
    """Write `x > 3` or `1 ≤ x < 2` as an interval; None when the relation is something else."""
    signs = relation.name.split(" ")
    parts = relation.parts
    if any(sign not in ("<", ">", "\\le", "\\ge") for sign in signs):
        return None
    if len(parts) == 2:
        if parts[1].operation == "symbol" and not symbols_of(parts[0]):
            return _interval(Node("relation", (parts[1], parts[0]), _flipped(signs[0])))
        if parts[0].operation != "symbol" or symbols_of(parts[1]):
            return None
        if signs[0] in (">", "\\ge"):
            return Node("list", (parts[1], INFINITY), "()" if signs[0] == ">" else "[)")
        return Node("list", (Node("negate", (INFINITY,)), parts[1]), "()" if signs[0] == "<" else "(]")
    if len(parts) == 3 and parts[1].operation == "symbol" and not symbols_of(parts[0]) | symbols_of(parts[2]):
        if signs[0] in (">", "\\ge") and signs[1] in (">", "\\ge"):
            signs, parts = [_flipped(signs[1]), _flipped(signs[0])], (parts[2], parts[1], parts[0])
        if signs[0] in ("<", "\\le") and signs[1] in ("<", "\\le"):
            brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
            return Node("list", (parts[0], parts[2]), brackets)
    return None


def _as_union(node: Node) -> Node:
    """Write `x < 1 or x > 3` as a union of intervals."""
    if node.operation != "list" or node.name or not all(part.operation == "relation" for part in node.parts):
        return node
    intervals = [_interval(part) for part in node.parts]
    known = [interval for interval in intervals if interval is not None]
    if len(known) != len(intervals) or not known:
        return node
    union = known[0]
    for interval in known[1:]:
        union = Node("set_operation", (union, interval), "cup")
    return union


def _flipped(sign: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[sign]


def _is_set(node: Node) -> bool:
    return node.operation in ("list", "set_operation", "set_builder") or node.name == "\\Reals"


def _infinite(node: Node) -> int:
    """1 for ∞, −1 for −∞, 0 for everything else."""
    if node == INFINITY:
        return 1
    return -1 if node == Node("negate", (INFINITY,)) else 0


def _pieces(node: Node) -> list[Node]:
    found: list[Node] = []
    while node.operation == "set_operation":
        name, (left, right) = node.name, node.parts
        found.insert(0, right)
        node = left
        if node.operation == "set_operation" and node.name != name:
            break
    return [node, *found]


def _rows(node: Node) -> list[list[Node]] | None:
    if node.operation == "matrix":
        return [list(row.parts) for row in node.parts]
    if node.operation == "list" and node.name == "[]" and node.parts and all(part.name == "[]" for part in node.parts):
        return [list(row.parts) for row in node.parts]
    return [list(node.parts)] if node.operation == "list" and node.name in ("()", "[]") else None


def _line(rows: list[list[Node]]) -> list[list[Node]]:
    """Return a row or a column as one row; anything larger stays."""
    return [[row[0] for row in rows]] if all(len(row) == 1 for row in rows) else rows

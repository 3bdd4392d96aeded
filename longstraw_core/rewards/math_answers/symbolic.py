"""Compares what exact arithmetic leaves open, with sympy and math-verify; may take forever and must only be imported
by a worker process that somebody else kills."""

import logging
from typing import Any, cast

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from longstraw_core.rewards.math_answers.comparison import Outcome, exact_scalars, same_answer
from longstraw_core.rewards.math_answers.expression import Node
from longstraw_core.rewards.math_answers.limits import Unreadable
from longstraw_core.rewards.math_answers.parser import parse_value

logging.getLogger("math_verify").setLevel(logging.ERROR)

SAMPLE_POINTS = (sympy.Rational(3, 7), sympy.Rational(-11, 5), sympy.Rational(29, 13))
"""Where expressions with free symbols are compared before anything is simplified."""
DIGITS = 60
AGREEING_DIGITS = 40

_FUNCTIONS: dict[str, Any] = {
    "ln": sympy.log, "log": sympy.log, "exp": sympy.exp, "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling,
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot,
    "arcsec": sympy.asec, "arccsc": sympy.acsc, "sinh": sympy.sinh, "cosh": sympy.cosh,
    "tanh": sympy.tanh, "gcd": sympy.gcd, "lcm": sympy.lcm, "min": sympy.Min, "max": sympy.Max, "Re": sympy.re,
    "Im": sympy.im, "arg": sympy.arg,
}  # fmt: skip


def compare_texts(truth: str, answer: str) -> tuple[Outcome, str]:
    """Compare two cleaned texts; return the outcome and what decided it."""
    try:
        return same_answer(parse_value(truth), parse_value(answer), symbolic_scalars), "symbolic"
    except Unreadable:
        return _by_library(truth, answer), "library"


def warm_up() -> None:
    """Load what sympy and math-verify load on first use, so that it does not count against a deadline."""
    compare_texts("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}")
    compare_texts("1/2", "\\cos(\\pi/3)")
    compare_texts("\\sin(2x)", "2\\sin(x)\\cos(x)")
    _by_library("\\int_0^1 x dx", "\\frac12")


def library_reads(text: str) -> bool:
    """Whether math-verify can read the text as one value."""
    return _library_value(text) is not None


def symbolic_scalars(truth: Node, answer: Node) -> Outcome:
    """Compare two numbers: exactly where possible, else numerically for a difference and symbolically for equality."""
    known = exact_scalars(truth, answer)
    if known is not None:
        return known
    return _same_expression(_expression(truth), _expression(answer))


def _same_expression(first: Any, second: Any) -> Outcome:
    symbols = sorted((first - second).free_symbols, key=str)
    for point in SAMPLE_POINTS if symbols else (None,):
        values = {} if point is None else {symbol: point + index for index, symbol in enumerate(symbols)}
        left, right = (sympy.N(side.subs(values), DIGITS) for side in (first, second))
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            continue
        if abs(left - right) > sympy.Float(10, DIGITS) ** -AGREEING_DIGITS * max(abs(left), abs(right)):
            return False
    difference = first - second
    if sympy.expand(sympy.sqrtdenest(difference)) == 0:
        return True
    if difference.equals(0) or sympy.simplify(difference) == 0:
        return True
    return None


def _expression(node: Node) -> Any:
    operation = node.operation
    if operation == "number":
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if operation == "symbol":
        constants = {"\\pi": sympy.pi, "e": sympy.E, "i": sympy.I}
        return constants.get(node.name) or sympy.Symbol(node.name, real=True)
    parts = [_expression(part) for part in node.parts]
    if operation == "add":
        return sympy.Add(*parts)
    if operation == "multiply":
        return sympy.Mul(*parts)
    if operation == "negate":
        return -parts[0]
    if operation == "divide":
        return parts[0] / parts[1]
    if operation == "power":
        return sympy.Pow(parts[0], parts[1])
    if operation == "root":
        return (
            sympy.real_root(parts[0], parts[1])
            if parts[0].is_negative and parts[1].is_odd
            else parts[0] ** (1 / parts[1])
        )
    if operation == "factorial":
        return sympy.factorial(parts[0])
    if operation == "binomial":
        return sympy.binomial(parts[0], parts[1])
    if operation == "function" and node.name == "log_":
        return sympy.log(parts[0], parts[1])
    if operation == "function" and node.name in _FUNCTIONS:
        return _FUNCTIONS[node.name](*parts)
    if operation == "function":
        return sympy.Function(node.name.removeprefix("call "))(*parts)
    raise Unreadable(f"{operation} is no number")


def _by_library(truth: str, answer: str) -> Outcome:
    """Let math-verify read both; its verdict counts only when an exact check agrees (it rounds and takes subsets)."""
    first, second = _library_value(truth), _library_value(answer)
    if first is None or second is None:
        raise Unreadable("math-verify does not read it either")
    if first == second:
        return True
    if not verify(first, second, float_rounding=DIGITS, numeric_precision=DIGITS, strict=True, timeout_seconds=None):
        return False
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr):
        return _same_expression(first.doit(), second.doit())
    return None


def _library_value(text: str) -> Any:
    found = cast(
        "list[Any]",
        parse(
            f"${text}$",
            extraction_config=[LatexExtractionConfig(try_extract_without_anchor=True)],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=cast(int, None),
        ),
    )
    values = [value for value in found if isinstance(value, sympy.Basic | sympy.MatrixBase)]
    return values[0] if len(values) == 1 else None

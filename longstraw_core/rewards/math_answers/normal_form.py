"""Exact arithmetic on syntax trees, bounded: quotients of sums of `rational · radicals · symbols`.

Generators are primes under rational exponents in (0, 1), the imaginary unit, π, e and free symbols. Such radicals are
linearly independent over the rationals and π is transcendental, so equal values have equal normal forms and, where no
opaque part (`sin`, nested radicals, …) is involved, different normal forms are different values. Decimals are the
fractions they write; nothing is rounded.
"""

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction

from longstraw_core.rewards.math_answers.expression import NUMBER_SETS, Node
from longstraw_core.rewards.math_answers.limits import (
    MAX_BITS,
    MAX_FACTORIAL,
    MAX_STEPS,
    MAX_TERMS,
    MAX_TRIAL_DIVISOR,
    OverLimit,
    Unreadable,
)

Monomial = tuple[tuple[str, Fraction], ...]
Sum = dict[Monomial, Fraction]
ONE: Monomial = ()


@dataclass(frozen=True, slots=True)
class Value:
    """`top / bottom`; `opaque` when a generator hides something, so that different forms may still be equal."""

    top: Sum
    bottom: Sum
    opaque: bool = False

    @property
    def rational(self) -> Fraction | None:
        """The value when it is a rational number."""
        if self.bottom == {ONE: 1} and not set(self.top) - {ONE}:
            return self.top.get(ONE, Fraction(0))
        return None

    def key(self) -> str:
        """A text that equal keys share only when the values are equal."""
        leading = self.bottom[min(self.bottom)]
        parts = [
            ";".join(f"{monomial}{coefficient / leading}" for monomial, coefficient in sorted(part.items()))
            for part in (self.top, self.bottom)
        ]
        return hashlib.blake2b("/".join(parts).encode(), digest_size=12).hexdigest()


def evaluate(node: Node) -> Value:
    """Return the normal form of a scalar.

    Raises:
        Unreadable: it is no scalar, or divides by zero.
        OverLimit: the value is larger than the limits.
    """
    return _Evaluator().value(node)


def same_value(first: Value, second: Value) -> bool | None:
    """Say whether two values are equal; None: this arithmetic cannot tell."""
    work = _Evaluator()
    if work.product(first.top, second.bottom) == work.product(second.top, first.bottom):
        return True
    if first.opaque or second.opaque or _mixes_e_and_pi(first, second):
        return None
    return False


def proportional(first: Value, second: Value) -> bool | None:
    """Say whether one value is a non-zero rational multiple of the other (equations `… = 0` compared)."""
    if not first.top or not second.top:
        return not first.top and not second.top
    work = _Evaluator()
    left, right = work.product(first.top, second.bottom), work.product(second.top, first.bottom)
    leading = min(left)
    if leading in right:
        factor = right[leading] / left[leading]
        if {monomial: coefficient * factor for monomial, coefficient in left.items()} == right:
            return True
    return None if first.opaque or second.opaque or _mixes_e_and_pi(first, second) else False


def _mixes_e_and_pi(*values: Value) -> bool:
    names = {
        name for value in values for part in (value.top, value.bottom) for monomial in part for name, _ in monomial
    }
    return {"e", "\\pi"} <= names


def _constant(value: Fraction) -> Value:
    return Value({ONE: value} if value else {}, {ONE: Fraction(1)})


def _generator(name: str, opaque: bool = False) -> Value:
    return Value({((name, Fraction(1)),): Fraction(1)}, {ONE: Fraction(1)}, opaque)


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverLimit("a number with too many digits")
    return value


class _Evaluator:
    """One evaluation with its own budget of steps."""

    def __init__(self) -> None:
        self._steps = 0

    def value(self, node: Node) -> Value:
        operation, parts = node.operation, node.parts
        if operation == "number":
            return _constant(node.value)
        if operation == "symbol":
            if node.name == "\\infty" or node.name in NUMBER_SETS:
                raise Unreadable(f"arithmetic with {node.name}")
            return _generator(node.name)
        if operation == "add":
            total = self.value(parts[0])
            for part in parts[1:]:
                total = self._added(total, self.value(part))
            return total
        if operation == "multiply":
            total = self.value(parts[0])
            for part in parts[1:]:
                total = self._times(total, self.value(part))
            return total
        if operation == "negate":
            inner = self.value(parts[0])
            return Value({monomial: -c for monomial, c in inner.top.items()}, inner.bottom, inner.opaque)
        if operation == "divide":
            return self._times(self.value(parts[0]), self._inverse(self.value(parts[1])))
        if operation == "power":
            return self._power(self.value(parts[0]), self.value(parts[1]), real_root=False)
        if operation == "root":
            degree = self.value(parts[1])
            return self._power(self.value(parts[0]), self._inverse(degree), real_root=True)
        if operation == "factorial":
            return self._factorial(self.value(parts[0]))
        if operation == "binomial":
            return self._binomial(self.value(parts[0]), self.value(parts[1]))
        if operation == "function":
            return self._function(node.name, [self.value(part) for part in parts])
        raise Unreadable(f"{operation} is no number")

    def product(self, first: Sum, second: Sum) -> Sum:
        if len(first) == len(second) == 1 and ONE in first and ONE in second:
            return {ONE: _small(first[ONE] * second[ONE])}
        self._spend(len(first) * len(second))
        total: Sum = {}
        for left, left_coefficient in first.items():
            for right, right_coefficient in second.items():
                monomial, coefficient = self._monomial(left, right, left_coefficient * right_coefficient)
                total[monomial] = total.get(monomial, Fraction(0)) + coefficient
        if len(total) > MAX_TERMS:
            raise OverLimit("a sum with too many terms")
        return {monomial: _small(coefficient) for monomial, coefficient in total.items() if coefficient}

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise OverLimit("too many steps of exact arithmetic")

    def _monomial(self, left: Monomial, right: Monomial, coefficient: Fraction) -> tuple[Monomial, Fraction]:
        if not left or not right:
            return left or right, coefficient
        exponents = dict(left)
        for name, exponent in right:
            exponents[name] = exponents.get(name, Fraction(0)) + exponent
        kept: list[tuple[str, Fraction]] = []
        for name, exponent in exponents.items():
            if name == "i":
                turns = int(exponent) % 4
                coefficient = -coefficient if turns >= 2 else coefficient
                exponent = Fraction(turns % 2)
            elif name.isdigit():
                whole = math.floor(exponent)
                coefficient *= Fraction(int(name)) ** whole
                exponent -= whole
            if exponent:
                kept.append((name, exponent))
        return tuple(sorted(kept)), coefficient

    def _added(self, first: Value, second: Value) -> Value:
        opaque = first.opaque or second.opaque
        if first.bottom == second.bottom:
            return Value(_sum(first.top, second.top), first.bottom, opaque)
        top = _sum(self.product(first.top, second.bottom), self.product(second.top, first.bottom))
        return self._reduced(top, self.product(first.bottom, second.bottom), opaque)

    def _times(self, first: Value, second: Value) -> Value:
        top = self.product(first.top, second.top)
        return self._reduced(top, self.product(first.bottom, second.bottom), first.opaque or second.opaque)

    def _inverse(self, value: Value) -> Value:
        if not value.top:
            raise Unreadable("division by zero")
        return self._reduced(value.bottom, value.top, value.opaque)

    def _reduced(self, top: Sum, bottom: Sum, opaque: bool) -> Value:
        """Divide by a bottom of one term, so that most values have bottom 1."""
        if len(bottom) == 1 and bottom != {ONE: 1}:
            ((monomial, coefficient),) = bottom.items()
            settled, factor = self._settled(tuple((name, -exponent) for name, exponent in monomial), 1 / coefficient)
            top, bottom = self.product(top, {settled: factor}), {ONE: Fraction(1)}
        return Value(top, bottom, opaque)

    def _settled(self, term: Monomial, factor: Fraction) -> tuple[Monomial, Fraction]:
        settled: Monomial = ONE
        for power in term:
            if power[0].isdigit() or power[0] == "i":
                # multiplying by the unit term brings the exponent of a prime into [0, 1)
                whole, factor = self._monomial((power,), ((power[0], Fraction(0)),), factor)
            else:
                whole = (power,)
            settled, factor = self._monomial(settled, whole, factor)
        return settled, factor

    def _power(self, base: Value, exponent: Value, *, real_root: bool) -> Value:
        power = exponent.rational
        if power is None:
            return _opaque("power", base, exponent)
        if power.denominator == 1:
            return self._integer_power(base, power.numerator)
        number = base.rational
        if number is not None and (number >= 0 or real_root or power.denominator == 2):
            return self._fractional_power(number, power)
        return _opaque("power", base, exponent)

    def _integer_power(self, base: Value, power: int) -> Value:
        if power < 0:
            return self._integer_power(self._inverse(base), -power)
        if power == 0:
            if not base.top:
                raise Unreadable("zero to the power of zero")
            return _constant(Fraction(1))
        number = base.rational
        if number is not None:
            if number in (0, 1, -1):
                return _constant(number if number == 0 else Fraction(1 if power % 2 == 0 else number))
            bits = max(number.numerator.bit_length(), number.denominator.bit_length())
            if bits * power > MAX_BITS:
                raise OverLimit(f"a power with about {bits * power} binary digits")
            return _constant(number**power)
        if len(base.top) == 1 and base.bottom == {ONE: 1}:
            ((monomial, coefficient),) = base.top.items()
            bits = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
            primes = sum(int(name).bit_length() for name, _ in monomial if name.isdigit())
            if (bits + primes) * power > MAX_BITS:
                raise OverLimit("a power with too many digits")
            raised = tuple((name, exponent * power) for name, exponent in monomial)
            settled, factor = self._settled(raised, coefficient**power)
            return Value({settled: factor}, base.bottom, base.opaque)
        if power > 256:
            raise OverLimit(f"a sum to the power of {power}")
        result = _constant(Fraction(1))
        for bit in bin(power)[2:]:
            result = self._times(result, result)
            if bit == "1":
                result = self._times(result, base)
        return result

    def _fractional_power(self, number: Fraction, power: Fraction) -> Value:
        if number == 0:
            if power < 0:
                raise Unreadable("division by zero")
            return _constant(Fraction(0))
        if abs(power.numerator) > 10_000 or power.denominator > 1_000:
            raise OverLimit("a power with a large exponent")
        factor = Fraction(1)
        exponents: list[tuple[str, Fraction]] = []
        if number < 0:
            if power.denominator == 2:
                exponents.append(("i", Fraction(power.numerator % 4)))
            elif power.denominator % 2:
                factor = Fraction(-1 if power.numerator % 2 else 1)
            else:
                return _opaque("power", _constant(number), _constant(power))
            number = -number
        opaque = False
        result = Value({ONE: factor}, {ONE: Fraction(1)})
        for part, sign in ((number.numerator, 1), (number.denominator, -1)):
            for prime, count, proven in _factored(part):
                opaque = opaque or not proven
                if prime.bit_length() * abs(count * power) > MAX_BITS:
                    raise OverLimit("a power with too many digits")
                exponents.append((str(prime), count * power * sign))
        for generator in exponents:
            settled, scale = self._settled((generator,), Fraction(1))
            result = self._times(result, Value({settled: scale}, {ONE: Fraction(1)}))
        return Value(result.top, result.bottom, opaque)

    def _factorial(self, value: Value) -> Value:
        number = value.rational
        if number is None:
            return _opaque("factorial", value)
        if number.denominator != 1 or number < 0:
            raise Unreadable("the factorial of no natural number")
        if number > MAX_FACTORIAL:
            raise OverLimit(f"a factorial beyond {MAX_FACTORIAL}")
        return _constant(Fraction(math.factorial(int(number))))

    def _binomial(self, top: Value, bottom: Value) -> Value:
        first, second = top.rational, bottom.rational
        if first is None or second is None:
            return _opaque("binomial", top, bottom)
        if first.denominator != 1 or second.denominator != 1 or first < 0:
            raise Unreadable("a binomial coefficient of no natural numbers")
        chosen = min(second, first - second)
        if chosen < 0:
            return _constant(Fraction(0))
        if first.numerator.bit_length() * chosen > MAX_BITS:
            raise OverLimit("a binomial coefficient with too many digits")
        return _constant(Fraction(math.comb(int(first), int(second))))

    def _function(self, name: str, arguments: list[Value]) -> Value:
        numbers = [argument.rational for argument in arguments]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers):
            exact = _exact_function(name, known)
            if exact is not None:
                return _constant(_small(exact))
        if name == "exp" and len(arguments) == 1:
            return self._power(_generator("e"), arguments[0], real_root=False)
        return _opaque(name, *arguments)


def _exact_function(name: str, numbers: list[Fraction]) -> Fraction | None:
    first = numbers[0]
    whole = all(number.denominator == 1 for number in numbers)
    if name == "abs" and len(numbers) == 1:
        return abs(first)
    if name == "floor" and len(numbers) == 1:
        return Fraction(math.floor(first))
    if name == "ceil" and len(numbers) == 1:
        return Fraction(math.ceil(first))
    if name in ("min", "max"):
        return min(numbers) if name == "min" else max(numbers)
    if name in ("gcd", "lcm") and whole:
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*(int(number) for number in numbers)))
    if first == 0 and name in ("sin", "tan", "arcsin", "arctan", "sinh", "tanh"):
        return Fraction(0)
    if (first == 0 and name in ("cos", "cosh", "exp")) or (first == 1 and name in ("ln", "log") and len(numbers) == 1):
        return Fraction(0 if name in ("ln", "log") else 1)
    if name == "log_" and len(numbers) == 2:
        return _exact_logarithm(first, numbers[1])
    return None


def _exact_logarithm(number: Fraction, base: Fraction) -> Fraction | None:
    """Return log_base(number) when it is a small integer or minus one."""
    if number <= 0 or base <= 0 or base == 1:
        raise Unreadable("a logarithm that does not exist")
    if number.denominator == 1 and base.denominator == 1 and number.numerator.bit_length() <= 4_096:
        power, exponent = 1, 0
        while power < number.numerator and exponent < 4_096:
            power, exponent = power * base.numerator, exponent + 1
        if power == number.numerator:
            return Fraction(exponent)
    return None


def _opaque(name: str, *arguments: Value) -> Value:
    return _generator("#" + name + ":" + ",".join(argument.key() for argument in arguments), opaque=True)


def _sum(first: Sum, second: Sum) -> Sum:
    total = dict(first)
    for monomial, coefficient in second.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    if len(total) > MAX_TERMS:
        raise OverLimit("a sum with too many terms")
    return {monomial: _small(coefficient) for monomial, coefficient in total.items() if coefficient}


def _factored(number: int) -> list[tuple[int, int, bool]]:
    """Return (factor, count, proven prime); a cofactor beyond trial division is kept whole and not proven."""
    if number.bit_length() > 4_096:
        raise OverLimit("a radicand with too many digits")
    found: list[tuple[int, int, bool]] = []
    divisor = 2
    while divisor <= MAX_TRIAL_DIVISOR and divisor * divisor <= number:
        count = 0
        while number % divisor == 0:
            number, count = number // divisor, count + 1
        if count:
            found.append((divisor, count, True))
        divisor += 1 if divisor == 2 else 2
    if number > 1:
        root = math.isqrt(number)
        if root * root == number and number > MAX_TRIAL_DIVISOR**2:
            found.append((root, 2, root < MAX_TRIAL_DIVISOR**2))
        else:
            found.append((number, 1, number < MAX_TRIAL_DIVISOR**2))
    return found

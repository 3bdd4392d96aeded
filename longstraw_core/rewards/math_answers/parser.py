"""Reads cleaned text as one value: recursive descent with a depth limit over a small grammar of answers.

What it refuses on purpose: two numbers side by side (`3 4` is not 12), a letter followed by a number, words.
"""

from fractions import Fraction

from longstraw_core.rewards.math_answers.expression import INFINITY, NUMBER_SETS, Node, number
from longstraw_core.rewards.math_answers.limits import MAX_DEPTH, MAX_VALUES, Unreadable
from longstraw_core.rewards.math_answers.tokens import FUNCTIONS, Token, tokenize

RELATIONS = frozenset(("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx"))
_SEPARATORS = frozenset((",", ";", "\\or", "\\and"))
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell pi"
)
_GREEK = frozenset("\\" + name for name in _GREEK_NAMES.split())
_COMMANDS_OF_ATOMS = frozenset(("\\frac", "\\sqrt", "\\cbrt", "\\binom", "\\infty", "\\emptyset", "\\{"))
_STARTS_ATOM = frozenset(("(", "{", "letter", *_COMMANDS_OF_ATOMS, *_GREEK, *("\\" + name for name in FUNCTIONS)))
_INVERSE = ["^", "{", "-", "1", "}", "("]
"""Follows the name of a function in `f^{-1}(x)`."""
_END = Token("end", "")


def parse_value(text: str) -> Node:
    """Parse cleaned text; a bare list of values becomes a list without brackets.

    Raises:
        Unreadable: the text is not one value.
        OverLimit: a number is too large to read.
    """
    return _Parser(tokenize(text)).whole()


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0
        self._bars = 0
        self._plus_minus = 0

    def whole(self) -> Node:
        if not self._tokens:
            raise Unreadable("nothing there")
        parts, _ = self._items(frozenset(("end",)))
        return parts[0] if len(parts) == 1 else Node("list", tuple(parts))

    def _items(self, closing: frozenset[str]) -> tuple[list[Node], str]:
        """Parse values between separators up to a closing token, which is taken."""
        items = [self._quotient()]
        while True:
            token = self._take()
            if token.kind in closing:
                return items, token.kind
            if token.kind not in _SEPARATORS:
                raise Unreadable(f"{token.text!r} in the wrong place")
            if token.kind == "," and self._peek().kind in ("\\or", "\\and"):
                self._take()
            items.append(self._quotient())

    def _quotient(self) -> Node:
        """Parse a relation, or two of them under TeX's `\\over` or `\\choose`."""
        value = self._relation()
        if self._peek().kind in ("\\over", "\\choose"):
            operation = "divide" if self._take().kind == "\\over" else "binomial"
            value = Node(operation, (value, self._relation()))
        return value

    def _relation(self) -> Node:
        parts, signs = [self._ratio()], list[str]()
        while self._peek().kind in RELATIONS:
            signs.append(self._take().kind)
            parts.append(self._ratio())
        value = Node("relation", tuple(parts), " ".join(signs)) if signs else parts[0]
        return Node("congruence", (value, self._modulus())) if self._at_modulus() else value

    def _at_modulus(self) -> bool:
        return self._peek().kind == "\\mod" or (self._peek().kind == "(" and self._peek(1).kind == "\\mod")

    def _modulus(self) -> Node:
        """Parse `\\pmod{5}`, `(mod 5)` or `mod 5`."""
        bracket = self._take().kind == "("
        if bracket:
            self._take()
        modulus = self._argument() if self._peek().kind == "{" else self._product()
        if bracket:
            self._expect(")")
        return modulus

    def _ratio(self) -> Node:
        parts = [self._set()]
        while self._peek().kind == ":":
            self._take()
            parts.append(self._set())
        return parts[0] if len(parts) == 1 else Node("list", tuple(parts), ":")

    def _set(self) -> Node:
        left = self._sum()
        count = 0
        while self._peek().kind in ("\\cup", "\\cap", "\\setminus"):
            name = self._take().kind[1:]
            count += 1
            if count > MAX_VALUES:
                raise Unreadable("too many sets")
            left = Node("set_operation", (left, self._sum()), name)
        return left

    def _sum(self) -> Node:
        self._enter()
        terms = [self._product()]
        while (sign := self._peek().kind) in ("+", "-", "\\pm"):
            self._take()
            term = self._product()
            if sign == "\\pm":
                self._count_plus_minus()
                terms = [Node("plus_minus", (_added(terms), term))]
            else:
                terms.append(Node("negate", (term,)) if sign == "-" else term)
        self._leave()
        return _added(terms)

    def _product(self) -> Node:
        factors = [self._signed()]
        while True:
            token = self._peek()
            if token.kind == "*":
                self._take()
                factors.append(self._signed())
            elif token.kind == "/":
                self._take()
                factors.append(Node("divide", (number(1), self._signed())))
            elif not self._at_modulus() and (token.kind in _STARTS_ATOM or (token.kind == "|" and not self._bars)):
                factors.append(self._powered())
            else:
                return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))

    def _count_plus_minus(self) -> None:
        self._plus_minus += 1
        if 2**self._plus_minus > MAX_VALUES:
            raise Unreadable("too many ±")

    def _signed(self) -> Node:
        signs: list[str] = []
        while self._peek().kind in ("+", "-", "\\pm"):
            signs.append(self._take().kind)
            if len(signs) > 8:
                raise Unreadable("too many signs")
        value = self._powered()
        for sign in reversed(signs):
            if sign == "-":
                value = Node("negate", (value,))
            elif sign == "\\pm":
                self._count_plus_minus()
                value = Node("plus_minus", (number(0), value))
        return value

    def _powered(self) -> Node:
        self._enter()
        value = self._atom()
        for _ in range(9):
            kind = self._peek().kind
            if kind == "^":
                self._take()
                if self._peek().kind == "'":
                    raise Unreadable("a prime")
                value = Node("power", (value, self._exponent()))
                if self._peek().kind == "^":
                    # a^b^c is a^(b^c)
                    self._take()
                    value = Node("power", (value.parts[0], Node("power", (value.parts[1], self._exponent()))))
                    if self._peek().kind == "^":
                        raise Unreadable("more than two powers without braces")
            elif kind == "!":
                self._take()
                if self._peek().kind == "!":
                    raise Unreadable("two factorial signs")
                value = Node("factorial", (value,))
            elif kind == "°":
                self._take()
                value = Node("multiply", (value, Node("symbol", name="°")))
            elif kind == "%":
                self._take()
                value = Node("multiply", (value, number(Fraction(1, 100))))
            else:
                self._leave()
                return value
        raise Unreadable("too many signs after a value")

    def _exponent(self) -> Node:
        token = self._peek()
        if token.kind in ("+", "-"):
            self._take()
            value = self._argument()
            return Node("negate", (value,)) if token.kind == "-" else value
        return self._argument()

    def _argument(self) -> Node:
        """Parse `{…}` or one symbol, as LaTeX reads the argument of a command; digits of a number stay together."""
        if self._peek().kind == "{":
            return self._braced()
        if self._peek().kind == "number":
            return number(self._take().value)
        return self._atom()

    def _short_argument(self) -> Node:
        """Parse `{…}` or one character: `\\frac12` is 1/2."""
        token = self._peek()
        if token.whole:
            rest = token.text[1:]
            if rest:
                self._tokens[self._next] = Token("number", rest, Fraction(int(rest)))
            else:
                self._take()
            return number(int(token.text[0]))
        return self._argument()

    def _braced(self) -> Node:
        self._expect("{")
        self._enter()
        value = self._quotient()
        if self._peek().kind in _SEPARATORS:
            # plain braces around several values are meant as a set
            self._take()
            others, _ = self._items(frozenset(("}",)))
            self._leave()
            return Node("list", (value, *others), "{}")
        self._expect("}")
        self._leave()
        return value

    def _atom(self) -> Node:
        token = self._take()
        kind = token.kind
        if kind == "number":
            return self._number(token)
        if kind == "letter" or kind in _GREEK:
            return self._symbol(token)
        if kind in ("(", "["):
            return self._bracketed(kind)
        if kind == "{":
            self._next -= 1
            return self._braced()
        if kind == "\\{":
            return self._set_braces()
        if kind == "|":
            return self._absolute()
        if kind in ("\\frac", "\\binom"):
            top = self._short_argument()
            return Node("divide" if kind == "\\frac" else "binomial", (top, self._short_argument()))
        if kind in ("\\sqrt", "\\cbrt"):
            return self._root(kind)
        if kind == "\\infty":
            return INFINITY
        if kind == "\\emptyset":
            return Node("list", (), "{}")
        if kind in NUMBER_SETS:
            return Node("symbol", name=kind)
        if kind[1:] in FUNCTIONS:
            return self._function(kind[1:])
        if kind == "\\begin":
            return self._matrix(token.text)
        raise Unreadable(f"{token.text[:40]!r} is not understood" if token.text else "it ends too early")

    def _number(self, token: Token) -> Node:
        """Parse a number, or a mixed number: `3 1/2`, `3\\frac{1}{2}`."""
        tokens, place = self._tokens, self._next
        value = token.value
        if self._peek().kind == "_":
            return self._in_base(token)
        follows = [part.kind for part in tokens[place : place + 7]]
        if self._peek().kind == "number":
            parts = tokens[place : place + 3]
            if token.whole and follows[:3] == ["number", "/", "number"] and parts[0].whole and parts[2].whole:
                self._next += 3
                return self._mixed(value, parts[0].value, parts[2].value)
            raise Unreadable("two numbers side by side")
        if token.whole and follows == ["\\frac", "{", "number", "}", "{", "number", "}"]:
            top, bottom = tokens[place + 2], tokens[place + 5]
            if top.whole and bottom.whole and top.value < bottom.value:
                self._next += 7
                return self._mixed(value, top.value, bottom.value)
        if token.whole and follows[:2] == ["\\frac", "number"] and tokens[place + 1].whole:
            digits = tokens[place + 1].text
            if len(digits) == 2 and digits[0] < digits[1]:
                self._next += 2
                return self._mixed(value, Fraction(int(digits[0])), Fraction(int(digits[1])))
        return number(value)

    def _in_base(self, token: Token) -> Node:
        """Parse the base after the digits of a number: `101_2` is five."""
        self._take()
        base = self._argument()
        if not token.whole or base.operation != "number" or not 2 <= base.value <= 10:
            raise Unreadable("an index that is no base of its digits")
        if any(int(digit) >= base.value for digit in token.text):
            raise Unreadable(f"a digit that base {base.value} does not have")
        return number(int(token.text, int(base.value)))

    def _mixed(self, whole: Fraction, top: Fraction, bottom: Fraction) -> Node:
        if not 0 < top < bottom:
            raise Unreadable("a mixed number with an improper fraction")
        if self._peek().kind in (*_STARTS_ATOM, "^", "number"):
            raise Unreadable("a mixed number followed by a factor")
        return number(whole + top / bottom)

    def _symbol(self, token: Token) -> Node:
        name = token.text if token.kind == "letter" else token.kind
        if self._peek().kind == "_":
            self._take()
            if self._peek().kind == "{":
                self._take()
                inner: list[str] = []
                while self._peek().kind != "}":
                    part = self._take()
                    if part.kind == "end" or len(inner) > 16:
                        raise Unreadable("an unclosed index")
                    inner.append(part.text)
                self._take()
                name += "_" + "".join(inner)
            else:
                name += "_" + self._take().text
        while self._peek().kind == "'":
            name += self._take().text
        if name == "i" or name == "e":
            return Node("symbol", name=name)
        inverse = name in ("f", "g", "h", "F") and [self._peek(place).text for place in range(6)] == _INVERSE
        if inverse:
            name, self._next = name + "^-1", self._next + 5
        if self._peek().kind == "(" and (
            inverse or (not self._peek().spaced and name in ("f", "g", "h", "P", "F", "Q"))
        ):
            self._take()
            arguments, _ = self._items(frozenset((")",)))
            return Node("function", tuple(arguments), "call " + name)
        if self._peek().kind == "number":
            raise Unreadable("a letter followed by a number")
        return Node("symbol", name=name)

    def _bracketed(self, opening: str) -> Node:
        self._enter()
        if opening == "(" and self._peek().whole and self._peek(1).kind == ")" and self._peek(2).kind == "_":
            digits = self._take()
            self._take()
            self._leave()
            return self._in_base(digits)
        bars, self._bars = self._bars, 0
        items, closing = self._items(frozenset((")", "]")))
        self._bars = bars
        self._leave()
        if len(items) == 1 and opening == "(" and closing == ")":
            return items[0]
        if len(items) == 1 and items[0].operation == "matrix":
            return items[0]
        return Node("list", tuple(items), opening + closing)

    def _set_braces(self) -> Node:
        if self._peek().kind == "\\}":
            self._take()
            return Node("list", (), "{}")
        self._enter()
        builder = self._set_builder()
        if builder is None:
            items, _ = self._items(frozenset(("\\}",)))
            builder = Node("list", tuple(items), "{}")
        self._leave()
        return builder

    def _set_builder(self) -> Node | None:
        """Parse `x | x > 3` or `x \\in \\mathbb{R} : x > 3` inside braces; None when they hold elements."""
        bar = 3 if self._peek(1).kind == "\\in" else 1
        if self._peek().kind != "letter" or self._peek(bar).kind not in ("|", ":"):
            return None
        variable = self._symbol(self._take())
        domain = Node("symbol", name="\\Reals")
        if bar == 3:
            self._take()
            domain = self._atom()
        self._take()
        conditions, _ = self._items(frozenset(("\\}",)))
        return Node("set_builder", (variable, domain, *conditions))

    def _absolute(self) -> Node:
        self._enter()
        self._bars += 1
        value = self._sum()
        self._bars -= 1
        self._expect("|")
        self._leave()
        return Node("function", (value,), "abs")

    def _root(self, kind: str) -> Node:
        degree = number(3 if kind == "\\cbrt" else 2)
        if kind == "\\sqrt" and self._peek().kind == "[":
            self._take()
            degree = self._sum()
            self._expect("]")
        return Node("root", (self._short_argument(), degree))

    def _function(self, name: str) -> Node:
        self._enter()
        base: tuple[Node, ...] = ()
        power: Node | None = None
        for _ in range(2):
            if self._peek().kind == "_" and not base:
                self._take()
                base = (self._short_argument(),)
            elif self._peek().kind == "^" and power is None:
                self._take()
                power = self._exponent()
        if self._peek().kind in ("(", "\\{", "{"):
            closing = {"(": ")", "\\{": "\\}", "{": "}"}[self._take().kind]
            arguments, _ = self._items(frozenset((closing,)))
        else:
            argument = self._signed()
            while self._peek().kind in ("letter", *_GREEK, "\\frac", "\\sqrt"):
                argument = Node("multiply", (argument, self._powered()))
            arguments = [argument]
        if power == Node("negate", (number(1),)) and name in ("sin", "cos", "tan", "cot", "sec", "csc"):
            # the inverse function, not the reciprocal
            name, power = "arc" + name, None
        if name == "lg":
            name, base = "log", (number(10),)
        arguments = [_in_radians(argument) for argument in arguments]
        value = Node("function", (*arguments, *base), name + "_" if base else name)
        self._leave()
        return value if power is None else Node("power", (value, power))

    def _matrix(self, kind: str) -> Node:
        if kind not in ("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "array", "smallmatrix"):
            raise Unreadable(f"environment {kind[:20]!r}")
        if kind == "array" and self._peek().kind == "{":
            while self._take().kind not in ("}", "end"):
                pass
        self._enter()
        rows: list[Node] = []
        row: list[Node] = []
        while True:
            row.append(self._sum())
            token = self._take()
            if token.kind == "&":
                continue
            if token.kind == "\\\\" and self._peek().kind != "\\end":
                rows.append(Node("list", tuple(row), "()"))
                row = []
                continue
            if token.kind == "\\\\":
                token = self._take()
            if token.kind != "\\end" or token.text != kind:
                raise Unreadable("a matrix that does not end")
            rows.append(Node("list", tuple(row), "()"))
            self._leave()
            return Node("matrix", tuple(rows), "det" if kind == "vmatrix" else "")

    def _peek(self, ahead: int = 0) -> Token:
        place = self._next + ahead
        return self._tokens[place] if place < len(self._tokens) else _END

    def _take(self) -> Token:
        token = self._peek()
        self._next += 1
        return token

    def _expect(self, kind: str) -> None:
        token = self._take()
        if token.kind != kind:
            raise Unreadable(f"expected {kind}, found {token.text[:20]!r}" if token.text else f"{kind} is missing")

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"nested more than {MAX_DEPTH} deep")

    def _leave(self) -> None:
        self._depth -= 1


def _in_radians(node: Node) -> Node:
    """Replace the degree sign by π/180."""
    if node == Node("symbol", name="°"):
        return Node("divide", (Node("symbol", name="\\pi"), number(180)))
    parts = tuple(_in_radians(part) for part in node.parts)
    return node if parts == node.parts else Node(node.operation, parts, node.name, node.value)


def _added(terms: list[Node]) -> Node:
    return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

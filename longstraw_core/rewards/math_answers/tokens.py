"""Cuts cleaned text into tokens; decides what is a number and what is a variable, and nothing else."""

import re
from dataclasses import dataclass
from fractions import Fraction

from longstraw_core.rewards.math_answers.limits import (
    MAX_DIGITS,
    MAX_TOKENS,
    OverLimit,
    Unreadable,
)
from longstraw_core.rewards.math_answers.words import is_word

_FUNCTION_NAMES = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh ln log lg exp gcd "
    "lcm min max abs floor ceil det Re Im arg"
)
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_COMMAND_NAMES = "sqrt cbrt pi infty theta alpha beta lambda phi in or and mod"
WORD_COMMANDS = {
    **{name: "\\" + name for name in FUNCTIONS},
    **{name: "\\" + name for name in _COMMAND_NAMES.split()},
    "Pi": "\\pi", "inf": "\\infty", "oo": "\\infty", "infinity": "\\infty", "Infinity": "\\infty", "asin": "\\arcsin",
    "acos": "\\arccos", "atan": "\\arctan", "union": "\\cup", "modulo": "\\mod", "deg": "°", "OR": "\\or",
}  # fmt: skip
"""Names that mean something without a backslash."""
_SAME_COMMAND = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\leq": "\\le", "\\geq": "\\ge", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\neq": "\\ne", "\\lt": "<",
    "\\gt": ">", "\\cdot": "*", "\\times": "*", "\\ast": "*", "\\div": "/", "\\mp": "\\pm", "\\lbrace": "\\{",
    "\\rbrace": "\\}", "\\varnothing": "\\emptyset", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\mid": "|",
    "\\lbrack": "[", "\\rbrack": "]", "\\bar": "\\overline", "\\vee": "\\or", "\\lor": "\\or", "\\land": "\\and",
    "\\wedge": "\\and", "\\simeq": "\\approx", "\\equiv": "=", "\\bigcup": "\\cup", "\\backslash": "\\setminus",
    "\\operatorname": "", "\\arctg": "\\arctan", "\\tg": "\\tan", "\\ctg": "\\cot", "\\lparen": "(", "\\rparen": ")",
    "\\colon": ":", "\\boxed": "", "\\fbox": "", "\\pmod": "\\mod", "\\bmod": "\\mod", "\\sim": "\\approx",
    "\\thickapprox": "\\approx", "\\doteq": "\\approx", "\\angle": "",
    "\\langle": "(", "\\rangle": ")",
}  # fmt: skip
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])|[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9]| */)"
_FRACTION_PART = r"(?:\.[0-9]+)?"
_DOTTED = r"\\dot\s*\{?\s*([0-9])\s*\}?"
_REPEAT = rf"\.([0-9]*)(?:\\(?:overline|bar)\s*\{{\s*([0-9]+)\s*\}}|{_DOTTED}(?:([0-9]*){_DOTTED})?|\(([0-9]+)\))"
_TOKEN = re.compile(
    rf"(?P<space>\s+)"
    rf"|(?P<repeating>([0-9]+){_REPEAT})"
    rf"|(?P<grouped>(?:{_GROUPED}){_FRACTION_PART})"
    rf"|(?P<decimal>[0-9]*\.[0-9]+|[0-9]+)(?P<exponent>[eE][+-]?[0-9]{{1,6}}(?![0-9A-Za-z]))?"
    rf"|(?P<environment>\\(?:begin|end)\s*\{{(?P<name>[A-Za-z]{{1,20}})\*?\}})"
    rf"|(?P<command>\\(?:[A-Za-z]+|[{{}}|%$#&_\\]))"
    rf"|(?P<word>[A-Za-z]+)"
    rf"|(?P<sign>\*\*|<=|>=|!=|==|[-+*/^_!%(){{}}\[\]|=<>,;:&'°])"
)


@dataclass(frozen=True, slots=True)
class Token:
    """One symbol: `number` with its value, `letter`, or anything else with itself as kind."""

    kind: str
    text: str
    value: Fraction = Fraction(0)
    spaced: bool = False
    """Whether a blank stands before it."""

    @property
    def whole(self) -> bool:
        """Whether it is written as digits only."""
        return self.kind == "number" and self.text.isdigit()


def tokenize(text: str) -> list[Token]:
    """Cut cleaned text into tokens.

    Raises:
        Unreadable: a character that belongs to no token, or too many tokens.
        OverLimit: a number with too many digits or too large an exponent.
    """
    tokens: list[Token] = []
    position = 0
    brackets = 0
    spaced_commas = ", " in text
    spaced = False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"character {text[position]!r}")
        if match["grouped"] and "," in match["grouped"] and brackets and not spaced_commas:
            digits = match[0].partition(",")[0]
            tokens.append(Token("number", digits, Fraction(int(digits)), spaced))
            position, spaced = position + len(digits), False
            continue
        position = match.end()
        if match["space"]:
            spaced = True
            continue
        made = _made(match, spaced)
        brackets += sum(token.kind in ("(", "[", "\\{") for token in made)
        brackets -= sum(token.kind in (")", "]", "\\}") for token in made)
        tokens += made
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise Unreadable(f"more than {MAX_TOKENS} symbols")
    return tokens


def _made(match: re.Match[str], spaced: bool) -> list[Token]:
    text = match[0]
    if match["repeating"]:
        return [Token("number", text, _repeating(match), spaced)]
    if match["grouped"]:
        return [Token("number", text, _decimal(re.sub("[ ,]", "", text)), spaced)]
    if match["decimal"]:
        value = _decimal(match["decimal"])
        if match["exponent"]:
            exponent = int(match["exponent"][1:])
            if abs(exponent) > MAX_DIGITS:
                raise OverLimit(f"exponent {exponent}")
            value *= Fraction(10) ** exponent
        return [Token("number", text, value, spaced)]
    if match["environment"]:
        return [Token("\\begin" if text.startswith("\\begin") else "\\end", match["name"], spaced=spaced)]
    if match["command"]:
        name = _SAME_COMMAND.get(text, text)
        return [Token(name, text, spaced=spaced)] if name else []
    if match["word"]:
        if text in WORD_COMMANDS:
            return [Token(WORD_COMMANDS[text], text, spaced=spaced)]
        if is_word(text):
            raise Unreadable(f"the word {text[:40]!r}")
        return [Token("letter", letter, spaced=spaced and not place) for place, letter in enumerate(text)]
    kind = {"**": "^", "<=": "\\le", ">=": "\\ge", "!=": "\\ne", "==": "="}.get(text, text)
    return [Token(kind, text, spaced=spaced)]


def _decimal(text: str) -> Fraction:
    whole, _, places = text.partition(".")
    if len(whole) + len(places) > MAX_DIGITS:
        raise OverLimit(f"a number of {len(whole) + len(places)} digits")
    return Fraction(int((whole + places) or "0"), 10 ** len(places))


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed = match[3], match[4]
    period = match[5] or match[9] or (match[6] + (match[7] or "") + (match[8] or ""))
    if len(whole) + len(fixed) + len(period) > MAX_DIGITS:
        raise OverLimit("a repeating decimal with too many digits")
    scale = 10 ** len(fixed)
    return Fraction(int(whole + fixed), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))

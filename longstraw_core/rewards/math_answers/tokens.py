"""Cleans the text of one value and cuts it into tokens; decides what is a number, and nothing else."""

import re
from dataclasses import dataclass
from fractions import Fraction

from longstraw_core.rewards.math_answers.folding import fold
from longstraw_core.rewards.math_answers.limits import (
    MAX_ANSWER_CHARACTERS,
    MAX_DIGITS,
    MAX_TOKENS,
    OverLimit,
    Unreadable,
)

FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "ln",
        "log",
        "lg",
        "exp",
        "gcd",
        "lcm",
        "min",
        "max",
        "abs",
        "floor",
        "ceil",
        "det",
        "Re",
        "Im",
        "arg",
    ]
)
_WORD_COMMANDS = {
    **{name: "\\" + name for name in FUNCTIONS},
    "sqrt": "\\sqrt",
    "cbrt": "\\cbrt",
    "pi": "\\pi",
    "Pi": "\\pi",
    "inf": "\\infty",
    "infinity": "\\infty",
    "infty": "\\infty",
    "theta": "\\theta",
    "alpha": "\\alpha",
    "beta": "\\beta",
    "lambda": "\\lambda",
    "asin": "\\arcsin",
    "acos": "\\arccos",
    "atan": "\\arctan",
    "in": "\\in",
    "union": "\\cup",
    "or": "\\or",
    "and": "\\and",
    "mod": "\\mod",
}
_SAME_COMMAND = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\leq": "\\le", "\\geq": "\\ge", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\neq": "\\ne", "\\lt": "<",
    "\\gt": ">", "\\cdot": "*", "\\times": "*", "\\ast": "*", "\\div": "/", "\\mp": "\\pm", "\\lbrace": "\\{",
    "\\rbrace": "\\}", "\\varnothing": "\\emptyset", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\mid": "|",
    "\\lbrack": "[", "\\rbrack": "]", "\\bar": "\\overline", "\\vee": "\\or", "\\lor": "\\or", "\\land": "\\and",
    "\\wedge": "\\and", "\\simeq": "\\approx", "\\equiv": "=", "\\bigcup": "\\cup", "\\backslash": "\\setminus",
    "\\operatorname": "", "\\arctg": "\\arctan", "\\tg": "\\tan", "\\ctg": "\\cot", "\\lparen": "(", "\\rparen": ")",
    "\\colon": ":", "\\leftarrow": "=", "\\cup": "\\cup",
}  # fmt: skip
_IGNORED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg|middle|displaystyle|textstyle"
    r"|scriptstyle|limits|nolimits|mathstrut|strut|phantom\{\})(?![A-Za-z])\s*\.?(?![0-9])"
    r"|\\!"
)
_SPACES = re.compile(
    r"(?<!\\)\\(?:[,;: >]|q?quad(?![A-Za-z])|enspace(?![A-Za-z])|thinspace(?![A-Za-z])|hspace\{[^{}]*\})|~"
)
_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mathbb|mathcal"
    r"|operatorname\*?|emph|underline|rm|bf)\s*\{([^{}]*)\}"
)
_BOX = re.compile(r"^\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*$", re.DOTALL)
_BOLD = re.compile(r"(?<![A-Za-z0-9)*])(\*\*|__|`+|\*)([^*_`\n]+)\1(?![A-Za-z0-9(*])")
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])")
_MATH_GAP = re.compile(r"(?:\$|\\\)|\\\])\s*(?:\$|\\\(|\\\[)(?=\s*[0-9A-Za-z\\{(])")
_EDGES = " \t\r\n*_`\"'"
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])|[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9]| */)"
_FRACTION_PART = r"(?:\.[0-9]+)?"
_DOTTED = r"\\dot\s*\{?\s*([0-9])\s*\}?"
_REPEAT = rf"\.([0-9]*)(?:\\overline\s*\{{\s*([0-9]+)\s*\}}|{_DOTTED}(?:([0-9]*){_DOTTED})?|\(([0-9]+)\))"
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


def clean(text: str) -> str:
    """Take typography off: boxes, dollar signs, bold, spacing commands, styles, currency, trailing full stops.

    Raises:
        Unreadable: it is too long to be one value.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"longer than {MAX_ANSWER_CHARACTERS} characters")
    text = fold(text).strip()
    while (box := _BOX.match(text)) and _balanced(box[1]):
        text = box[1]
    text = text.replace("\\$", " ").replace("\\%", "%")
    text = re.sub("[€£¥₹]", " ", text)
    text = _MATH_GAP.sub(" ; ", text.replace("$$", "$"))
    text = text.replace("$", " ")
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    text = _BOLD.sub(r"\2", text)
    text = text.replace("\\lfloor", "\\floor(").replace("\\rfloor", ")")
    text = text.replace("\\lceil", "\\ceil(").replace("\\rceil", ")")
    text = text.replace("{,}", ",")
    text = _IGNORED.sub("", text)
    text = _SPACES.sub(" ", text)
    for _ in range(3):
        text, count = _STYLE.subn(_unstyled, text)
        if not count:
            break
    text = _DEGREE.sub("°", text)
    text = text.strip(_EDGES)
    return _without_full_stop(re.sub(r"\s+", " ", text)).strip(_EDGES)


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
        if text in _WORD_COMMANDS:
            return [Token(_WORD_COMMANDS[text], text, spaced=spaced)]
        if len(text) > 3:
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


def _unstyled(match: re.Match[str]) -> str:
    """`\\text{cm}` becomes words with blanks around; `\\mathrm{e}` becomes the letter alone."""
    return f" {match[1].strip()} " if match[1].strip() else " "


def _without_full_stop(text: str) -> str:
    text = text.rstrip(" ")
    while text.endswith("\\\\"):
        text = text[:-2].rstrip(" ")
    while text and text[-1] in ".,;:!" and not text.endswith(("\\,", "\\;", "\\:", "\\!")):
        if text[-1] == "!" and re.search(r"[0-9A-Za-z)}!]!$", text):
            break
        text = text[:-1].rstrip(" ")
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for mark in re.finditer(r"\\[\\{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth < 0:
            return False
    return depth == 0

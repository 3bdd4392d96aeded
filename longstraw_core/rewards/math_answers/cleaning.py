"""Takes typography off the text of one value; what is left is for the tokens, what changes the value stays."""

import re

from longstraw_core.rewards.math_answers.folding import fold
from longstraw_core.rewards.math_answers.limits import MAX_ANSWER_CHARACTERS, Unreadable
from longstraw_core.rewards.math_answers.units import SINGLE_LETTERS

_IGNORED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg|middle|displaystyle|textstyle"
    r"|scriptstyle|large|Large|LARGE|huge|Huge|small|normalsize|limits|nolimits|mathstrut|strut"
    r"|phantom\{\})(?![A-Za-z])\s*\.?(?![0-9])"
    r"|\\!"
)
_NO_DELIMITER = re.compile(r"\\(?:left|right|middle)\s*\.")
_FONT = r"\\(?:bf|rm|it|sf|tt|sl|em|bfseries|itshape|upshape|normalfont|boldmath)(?![A-Za-z])"
_FONT_IN_BRACES = re.compile(rf"\{{\s*{_FONT}\s*([^{{}}]*)\}}")
_FONT_ALONE = re.compile(rf"{_FONT}(?!\s*\{{)|\\(?:tag|label)\*?\s*\{{[^{{}}]*\}}|\\(?:ensuremath|framebox)(?=\s*\{{)")
_ALIGNED = re.compile(
    r"\\begin\{(aligned|align|alignat|equation|gather|gathered|split|displaymath|math)(\*?)\}(.*?)\\end\{\1\2\}",
    re.DOTALL,
)
_ORDINAL = re.compile(r"(?<=[0-9])\s*\^\s*\{?\s*\\(?:text|textrm|mathrm)\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?")
_UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
_CHINESE_UNIT_NAMES = {
    "平方厘米": "cm^2", "平方米": "m^2", "立方厘米": "cm^3", "立方米": "m^3", "千米": "km", "公里": "km", "厘米": "cm",
    "毫米": "mm", "分米": "dm", "米": "meters", "千克": "kg", "公斤": "kg", "克": "grams", "升": "liters", "毫升": "ml",
    "小时": "hours", "分钟": "minutes", "秒": "seconds", "天": "days", "度": "degrees", "元": "yuan",
}  # fmt: skip
_CHINESE_UNIT = re.compile(
    rf"(?<=[0-9)}}$])\s*(?P<known>{'|'.join(sorted(_CHINESE_UNIT_NAMES, key=len, reverse=True))})(?=[\s$.。]*$)"
    # a measure word and what it counts, without words that change the value (or, not, about, more, left over)
    r"|(?<=[0-9)}$])\s*[个只本人名位条张块种次岁支辆棵件页题朵根枚颗头匹间座袋箱瓶盒套层级"
    r"](?:(?![或和及与不非约以多少余左右到至])[\u4e00-\u9fff]){0,6}(?=[\s$.。]*$)"
)
_SPACES = re.compile(
    r"(?<!\\)\\(?:[,;: >]|q?quad(?![A-Za-z])|enspace(?![A-Za-z])|thinspace(?![A-Za-z])|hspace\{[^{}]*\})|~"
)
_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt"
    r"|boldsymbol|bm"
    r"|mathcal|operatorname\*?|emph|underline|rm|bf)\s*\{([^{}]*)\}"
)
_COLOR = re.compile(r"\\(?:color|textcolor|colorbox)\s*\{[A-Za-z]{1,20}\}")
_BOX = re.compile(r"^\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*$", re.DOTALL)
_BOLD = re.compile(r"(?<![A-Za-z0-9)*])(\*\*|__|`+|\*)([^*_`\n]+)\1(?![A-Za-z0-9(*])")
_STRUCK = re.compile(r"~~[^~]*~~|\\(?:cancel|xcancel|bcancel|sout|st)\s*\{[^{}]*\}|<(del|strike)>.*?</\1>", re.DOTALL)
_TAGS = re.compile(r"<(b|i|em|strong|u|code|span|mark)>([^<>]*)</\1>")
_TIMES_TEN = re.compile(r"(?<=[0-9]) ?[xX] ?(?=10 ?(?:\^|\*\*))")
_CHEERS = re.compile("[\u2705\ufe0f\U0001f300-\U0001f64f\U0001f680-\U0001f9ff]")
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\(?:text)?degree(?![A-Za-z])")
_MATH_GAP = re.compile(r"(?:\$|\\\)|\\\])\s*(?:\$|\\\(|\\\[)(?=\s*[0-9A-Za-z\\{(])")
_SET_NAMES = {"R": "\\Reals ", "Z": "\\Integers ", "N": "\\Naturals ", "Q": "\\Rationals ", "C": "\\Complexes "}
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb)\s*(?:\{\s*([RZNQC])\s*\}|([RZNQC]))|\\([RZNQ])(?![A-Za-z])")
_AMOUNT = r"(?P<amount>[0-9][0-9,]*(?:\{,\}[0-9]+)*(?:\.[0-9]+)?(?: (?:hundred|thousand|[mb]illion|trillion))?)"
_MONEY = re.compile(rf"(?:US|U\.S\. ?|C|A)?(?P<sign>\\\$|[€£¥₹]|(?:USD|EUR|GBP|INR|Rs)\.?(?= ?[0-9]))\s*{_AMOUNT}")
_MONEY_AFTER = re.compile(r"(?<=[0-9]) ?(?P<sign>\\\$|[€£¥₹])")
_UNPAIRED_DOLLAR = re.compile(r"(?<!\\)\$(?=[0-9])")
_CURRENCIES = {
    "\\$": "dollars", "€": "euros", "£": "GBP", "¥": "yen", "₹": "rupees", "USD": "dollars", "EUR": "euros",
    "GBP": "GBP", "INR": "rupees", "Rs": "rupees",
}  # fmt: skip
_APPROXIMATE_START = re.compile(r"^\s*~(?=\s?[-+]?[0-9.\\])")
_ONE_LETTER_UNIT = {
    "m": "meters", "g": "grams", "s": "seconds", "t": "tons", "h": "hours", "d": "days", "l": "liters", "L": "liters",
    "N": "newtons", "J": "joules", "W": "watts", "V": "volts", "K": "kelvins",
}  # fmt: skip
_EDGES = " \t\r\n#*_`\"'"


def clean(text: str) -> str:
    """Take typography off: boxes, dollar signs, bold, spacing commands, styles, trailing full stops.

    Currency signs become words after the amount, struck-out text disappears, a leading `~` becomes `\\approx`.

    Raises:
        Unreadable: it is too long to be one value.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"longer than {MAX_ANSWER_CHARACTERS} characters")
    text = fold(text).strip()
    while (box := _BOX.match(text)) and _balanced(box[1]):
        text = box[1]
    text = _TAGS.sub(r"\2", _STRUCK.sub(" ", text))
    text = _CHEERS.sub(" ", text)
    text = _TIMES_TEN.sub(r"\\times ", text)
    text = _APPROXIMATE_START.sub(r"\\approx ", text)
    text = _CHINESE_UNIT.sub(lambda found: f" {_CHINESE_UNIT_NAMES.get(found['known'], 'units')}", text)
    text = _money(text).replace("\\%", "%")
    text = _MATH_GAP.sub(" ; ", text.replace("$$", "$"))
    text = text.replace("$", " ")
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    text = _BOLD.sub(r"\2", text)
    text = text.replace("\\lfloor", "\\floor(").replace("\\rfloor", ")")
    text = text.replace("\\lceil", "\\ceil(").replace("\\rceil", ")")
    text = text.replace("{,}", ",")
    text = _NO_DELIMITER.sub(" ", text)
    text = _IGNORED.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _COLOR.sub("", text)
    text = _BLACKBOARD.sub(lambda found: _SET_NAMES[found[1] or found[2] or found[3]], text)
    text = _ALIGNED.sub(_one_line, text)
    text = _ORDINAL.sub(r" \1", text)
    text = _FONT_ALONE.sub(" ", _FONT_IN_BRACES.sub(r"\\mathrm{\1}", text))
    for _ in range(3):
        text, count = _STYLE.subn(_unstyled, text)
        if not count:
            break
    text = _UNION.sub(r"\\cup ", _DEGREE.sub("°", text))
    text = text.strip(_EDGES)
    return _without_full_stop(re.sub(r"\s+", " ", text)).strip(_EDGES)


def _money(text: str) -> str:
    if not re.search(r"[€£¥₹$]|USD|EUR|GBP|INR|Rs", text):
        return text
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        # one dollar sign without a partner stands for money, not for mathematics
        text = _UNPAIRED_DOLLAR.sub(r"\\$", text, count=1)
    text = _MONEY.sub(lambda found: f"{found['amount']} {_CURRENCIES[found['sign'].rstrip('.')]}", text)
    text = _MONEY_AFTER.sub(lambda found: f" {_CURRENCIES[found['sign']]}", text)
    return re.sub("[€£¥₹]", " ", text.replace("\\$", " "))


def _one_line(environment: re.Match[str]) -> str:
    """An alignment of one line is that line; several lines stay, since each may state a value."""
    body = environment[3].strip().removesuffix("\\\\")
    return environment[0] if "\\\\" in body else body.replace("&", " ")


def _unstyled(match: re.Match[str]) -> str:
    """`\\text{cm}` becomes words with blanks; `\\mathrm{m}` after a number becomes `meters`, never a variable."""
    content = match[1].strip()
    if not content:
        return " "
    if content in SINGLE_LETTERS and re.search(r"[0-9)}\]]\s*$", match.string[: match.start()]):
        content = _ONE_LETTER_UNIT[content]
    return f" {content} "


def _without_full_stop(text: str) -> str:
    text = text.rstrip(" ")
    text = text.rstrip(" \\")  # a line break, or a blank that lost its end
    if re.search(r"[0-9A-Za-z)}\]][,;]? ?\.{2,}$", text):
        return text  # `5...` goes on: it is not 5
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

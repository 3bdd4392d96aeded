"""English in answers: words are text, except for numbers, operations and sets that have a sign of their own."""

import re

_UP_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {name: number for number, name in enumerate(_UP_TO_NINETEEN.split())} | {
    name: 10 * number for number, name in enumerate(_TENS.split(), start=2)
}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}
_TIMES = {"hundred": 100, "dozen": 12, "gross": 144, "score": 20, **_LARGE}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100, "thousandth": 1000, "millionth": 10**6,
}  # fmt: skip
_NUMBER_WORD = "|".join(sorted([*_SMALL, *_LARGE, "hundred"], key=len, reverse=True))
_NUMBER_RUN = re.compile(
    rf"\b(?:{'|'.join(sorted(_SMALL, key=len, reverse=True))})(?:(?:[ \-]+(?:and +)?)(?:{_NUMBER_WORD}))*\b",
    re.IGNORECASE,
)
_MULTIPLIER = re.compile(rf"(?<=[0-9)}}]) +({'|'.join(_TIMES)})s?(?![A-Za-z])", re.IGNORECASE)
_AND_A_PART = re.compile(
    r"(?<=[0-9])(?: +and)? +(?:a|an|one|1)[ \-]+(half|third|quarter|fourth|fifth|sixth|eighth|tenth)\b", re.IGNORECASE
)
_PART = re.compile(rf"(?<![0-9.])([0-9]+)[ \-]+({'|'.join(_PARTS)})(s?)(?![A-Za-z])", re.IGNORECASE)
_ONE_PART = re.compile(r"^(?:a |an )?(half|third|quarter)$", re.IGNORECASE)
_OPERAND = r"(?= *[\-+]?[0-9(\\.])"
_OPERATIONS = [
    (re.compile(pattern, re.IGNORECASE), sign)
    for pattern, sign in (
        (rf"\bplus or minus{_OPERAND}", " \\\\pm"),
        (r"\b([ap])\.m\b\.?", r"\1m"),
        (r"\bhalf an? (?=[a-z])", "1/2 "),
        (r"(?<=[0-9)}]) *(?:per ?cents?|pct\.?)(?![A-Za-z])", "%"),
        (r"(?<=[0-9)}]) +squared\b", "^2"),
        (r"(?<=[0-9)}]) +cubed\b", "^3"),
        (r"(?<=[0-9)}]) +factorial\b", "!"),
        (r"\b(?:negative|minus) +(?=[0-9(\\.]|infinity\b|inf\b|pi\b)", "-"),
        (r"\b(?:positive|plus) +(?=infinity\b|inf\b)", "+"),
        (rf"(?<=[0-9)}}]) +plus{_OPERAND}", " +"),
        (rf"(?<=[0-9)}}]) +(?:times|multiplied by){_OPERAND}", " *"),
        (rf"(?<=[0-9)}}]) +(?:divided by|over){_OPERAND}", " /"),
        (rf"(?<=[0-9)}}]) +(?:(?:raised )?to the(?: power(?: of)?)?){_OPERAND}", "^"),
        (r"(?<=[0-9]) +point +(?=[0-9])", "."),
        (r"\b(?:the )?square root of +([0-9]+)\b", r"\\sqrt{\1}"),
        (r"\b(?:the )?cube root of +([0-9]+)\b", r"\\sqrt[3]{\1}"),
        (r"\b([0-9]+) +choose +([0-9]+)\b", r"\\binom{\1}{\2}"),
    )
]
_SETS = {
    "all real numbers": "\\Reals", "all reals": "\\Reals", "real numbers": "\\Reals", "reals": "\\Reals",
    "set of real numbers": "\\Reals", "set of all real numbers": "\\Reals", "all integers": "\\Integers",
    "set of integers": "\\Integers", "set of all integers": "\\Integers", "empty set": "\\emptyset",
}  # fmt: skip
_SAME_TEXT = {
    "dne": "does not exist", "no solutions": "no solution", "no real solutions": "no real solution",
    "there is no solution": "no solution", "there are no solutions": "no solution", "no solution exists": "no solution",
    "infinite": "infinity",
}  # fmt: skip
_SHORT = (
    "no on of or if is it in to so we he me my do go up us ok not the and for yes odd all any one two six "
    "ten but can may has had was are our out who how why way too own new old few get got let put say see "
    "saw set sum its his her him she you now nor yet per man men boy boys girl day bad dad dab cab add "
    "add end dne top red pts hrs"
)
SHORT_WORDS = frozenset(_SHORT.split())
"""Words of two or three letters that are never a product of variables."""
_NEVER_PRODUCTS = SHORT_WORDS - {"in", "or", "and"}
_VARIABLES = [set("abcd"), set("xyzw"), set("uvw"), set("klmn"), set("pqrst"), set("ijk"), set("fgh")]
_TEXT = re.compile(r"[\"'(]?[A-Za-z][A-Za-z'’.,;:!?\-/ ()0-9]*")
_LETTERS = re.compile("[A-Za-z]+")
_PLAIN_LETTERS = re.compile(r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]+")


def normalised_words(text: str) -> str:
    """Return text for comparison: without case, punctuation and articles, one blank between words."""
    words = re.sub(r"[^0-9a-z]+", " ", text.casefold().replace("'", "").replace("’", "")).split()
    kept = [word for word in words if word not in ("the", "a", "an")] or words
    joined = " ".join(kept)
    return _SAME_TEXT.get(joined, joined)


def is_word(run: str) -> bool:
    """Whether letters side by side are a word and not a product of variables; the names of functions are neither."""
    if len(run) >= 4:
        return True
    if len(run) == 1:
        return False
    return run.casefold() in _NEVER_PRODUCTS or (len(run) == 3 and run[0].isupper() and run[1:].islower())


def has_words(text: str) -> bool:
    """Whether a text has a word outside the names of LaTeX commands and environments."""
    return any(is_word(run) for run in _PLAIN_LETTERS.findall(text))


def are_words(text: str, commands: frozenset[str]) -> bool:
    """Whether a whole answer is words; `commands` are names that have a mathematical meaning (`sin`, `pi`)."""
    if not _TEXT.fullmatch(text):
        return False
    runs = _LETTERS.findall(text)
    plain = [run for run in runs if run not in commands]
    if any(is_word(run) for run in plain):
        return True
    if len(runs) == 1 and len(plain) == 1 and len(plain[0]) == 3 and text.strip("().,;:!? ") == plain[0]:
        # one run of three letters: usual variables (`abc`, `xyz`, `pqr`) are a product, anything else a word
        return not any(set(plain[0].lower()) <= group for group in _VARIABLES)
    return False


def as_set(text: str) -> str | None:
    """Return the sign of a set that is named in words."""
    return _SETS.get(normalised_words(text))


def spoken_mathematics(text: str) -> str:
    """Write numbers and operations in words with digits and signs: `5 dozen`, `two thirds`, `40 per cent`."""
    if not re.search(r"[A-Za-z]{3}|[ap]\.m", text):
        return text
    text = _NUMBER_RUN.sub(_numeral, text)
    text = _AND_A_PART.sub(lambda part: f" 1/{_PARTS[part[1].lower()]}", text)
    text = _MULTIPLIER.sub(lambda word: f" * {_TIMES[word[1].lower()]}", text)
    text = _PART.sub(_fraction, text)
    text = _ONE_PART.sub(lambda part: f"1/{_PARTS[part[1].lower()]}", text)
    for pattern, sign in _OPERATIONS:
        text = pattern.sub(sign, text)
    return text


def _numeral(run: re.Match[str]) -> str:
    total = current = 0
    for word in re.findall("[a-z]+", run[0].lower()):
        if word == "and":
            continue
        if word == "hundred":
            current *= 100
        elif word in _LARGE:
            total, current = total + current * _LARGE[word], 0
        else:
            value = _SMALL[word]
            if current % 100 and not (current % 10 == 0 and current % 100 >= 20 and 0 < value < 10):
                return run[0]
            if (current % 10 == 0 and current % 100 == 0) or value < 10:
                current += value
            else:
                return run[0]
    return str(total + current)


def _fraction(part: re.Match[str]) -> str:
    count, name, plural = int(part[1]), part[2].lower(), bool(part[3]) or part[2].lower() == "halves"
    if (count == 1) == plural:
        return part[0]
    return f"{part[1]}/{_PARTS[name]}"

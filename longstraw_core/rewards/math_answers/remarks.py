"""What people write around a value: lead-ins before it and remarks after it; decides which of them may be left out.

A remark may be left out when it gives reasons or names things, and may not when it could state another value.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from longstraw_core.rewards.math_answers.words import has_words, spoken_mathematics

REMARK = re.compile(
    r" ?\((?=[^()]{0,200}[A-Za-z]{2})(?!\\)| ?\((?= ?\\approx)| ?[,;:] (?=[A-Za-z]{2,}|i\.e|\()|\. (?=\S)|! (?=[A-Z])|"
    r" (?:since|because|as|which|where|so|when|hence|thus|therefore|if|after|from|by|for|with|using|given|while|unless"
    r"|otherwise|else|rather|instead|remainder|at|of the(?= [0-9])|out of(?= the)|is (?:the|our|my)|--?-?) "
    r"|\\because|\\implies|\\Rightarrow|\\to(?![a-z])|✓|✔|■|□"
    r"|\\blacksquare|\\square|\\checkmark|\\qed"
)
"""Where a remark begins."""
_LEAD_IN = re.compile(
    r"^[A-Za-z][A-Za-z ,'\-]{0,120}?(?: (?:is|are|equals|be|gives|has|have|get|obtain|need|needs|takes|contains"
    r"|requires|costs|weighs|yields|was)|:"
    r"| ?=)(?: (?:exactly|equal to))?:? +(?=\S)"
)
_NO_LEAD_IN = re.compile(
    r"\b(?:while|import|def|return|lambda|print|eval|exec|true|false|none|for|if|else|try"
    r"|not|no|never|neither|nor|isn't|wrong|incorrect|maybe|perhaps|possibly|alternatively|either|or|but"
    r"|actually|unless"
    r"|however|except|impossible|cannot|[a-z]+n['’]t|approximately|about|roughly|almost|more|less|fewer|least|most|over"
    r"|under|than)\b",
    re.IGNORECASE,
)
APPROXIMATE = re.compile(
    r"^(?:(?:is )?(?:approximately|approx\.?|about|around|roughly|nearly|almost|circa|close to)(?= )"
    r"|\\approx(?![A-Za-z])"
    r"|\\(?:sim|simeq|thickapprox|doteq)(?![A-Za-z]))\s*",
    re.IGNORECASE,
)
APPROXIMATE_AFTER = re.compile(
    r"(?:,? \(?(?:approximately|approx\.?|roughly|rounded(?: [a-z0-9 ]{0,40})?|or so)\)?|-ish)$", re.I
)
CHOICE = re.compile(
    r"^(?:(?:[Oo]ption|[Cc]hoice) )?(?:\(([A-J])\)|([A-J])[).:])[:.]? ?(?=\S)|^(?:(?:[Oo]ption"
    r"|[Cc]hoice) )?\(?([A-J])\)?$"
)
"""The letter of a multiple-choice answer before its text."""
_DENIES = re.compile(
    r"\b(?:wrong|incorrect|impossible|invalid|rejected|withdrawn|mistaken?|correction|i mean|i meant|oops|sorry"
    r"|scratch that"
    r"|(?:is|does|was|are|can) ?n[o']t (?:correct|right|the answer|possible|valid|work|hold|it|be)|doesn't work"
    r"|can't be"
    r"|or more|or less|or fewer|at least|at most)\b",
    re.IGNORECASE,
)
"""Takes the value back, with or without another one."""
_NO = re.compile(r"[ ,;:.(!\-]*(?:no|nope|not|false|✗|✘|❌)[ ).,!]*", re.IGNORECASE)
_HEDGES = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|alternatively|either|instead|actually|unless|however|except|otherwise|else"
    r"|backup|wait"
    r"|should|could|might|but|not|no|never|rather|if not|previously|remainder|and)\b",
    re.IGNORECASE,
)
"""Brings another value in, when there is one."""
_EXCLUDED = re.compile(
    r"(?:,? ?(?:and|but))? ?\b(?:not|rather than|instead of|never) +(?:\(|\$)?[-+]?[0-9][0-9.,/]*(?:\)"
    r"|\$)?(?![0-9A-Za-z])",
    re.I,
)
"""`not 6` beside a value excludes that one."""
_SAME_AGAIN = re.compile(
    r"^[ (,;:.]*(?:i\.e\.?,?|that is,?|namely,?|which (?:is|equals|gives|simplifies to)|(?:or )?equivalently,?|equal to"
    r"|in other words,?|so the (?:final )?answer is|(?:and )?so|hence|thus|therefore|=|aka|also known as"
    r"|\\implies|\\Rightarrow"
    r"|\\to|in (?:decimal|fraction|simplest)s?(?: form)?:?|simplified:?|the (?:final )?answer is)(?![A-Za-z]) *"
)
_REASON = re.compile(
    r"^[ (,;:.]*(?:since|because|as|from|by|using|given|due to|after|note|check|checking|checked|verify"
    r"|verified|verification"
    r"|see|recall|where|with|via|proof|\\because)(?![A-Za-z])",
    re.IGNORECASE,
)
_CONDITION = re.compile(
    r"\b(?:for|when|if|where|at|mod|modulo|step|steps|part|case|problem|question|equation|eq\.|theorem|lemma"
    r"|section|line"
    r"|figure|page|exercise) ?\(?(?:[A-Za-z] ?(?:=|<|>|\\le|\\ge|\\ne) ?)?"
    r"[-+]?[0-9]+(?:\.[0-9]+)*\)?(?![0-9/]|\.[0-9])",
    re.IGNORECASE,
)
"""`when n = 3`, `mod 7` and `see step 2` name numbers that are no values of the answer."""
_OF_THEM = re.compile(r"\b(?:out )?of (?:the|these|those|all|our|its) [0-9]+\b", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?")
_ROUNDED = re.compile(
    r"[ (,;]*(?:(?:or|which is|that is,?|i\.e\.,?) +)?(?:approximately|approx\.?|about|roughly|around|\\approx) *"
    r"(?P<number>[-+]?[0-9]+(?:\.[0-9]+)?)(?: *[A-Za-z%°]+)?[ ).]*",
    re.IGNORECASE,
)
"""An exact value again, rounded."""
_VALUE_SIGN = re.compile(r"[0-9]|\\(?:frac|sqrt|pi|infty)(?![A-Za-z])")


_VERB = re.compile(
    r"^(?:=>?(?![<>])|[-=]+>|\\(?:therefore|implies|Rightarrow|rightarrow|Longrightarrow|to)(?![A-Za-z])"
    r"|(?:[Ii]t|[Tt]hat)'s +|(?:is|are|equals)(?: +exactly)? +(?=\S)|(?:exactly|only|just|precisely|simply) +(?=\S))\s*"
)
_CALLED = re.compile(r"(?:[A-Za-z]{1,8} ?[(\[][^()\[\]=<>]{1,30}[)\]]|\[[A-Z]{2,6}\])")
"""`Var(X)`, `P(A|B)`, `E[X]`, and the area `[ABC]`."""
_NOT_A_FACTOR = re.compile(r"[0-9}] \((?:by|as|at|an|be|via|cf|ie|eg|[ie]\.[eg]\.?) [^()]*\)$")


def ends_in_a_remark(text: str) -> bool:
    """Whether brackets after a number hold words, and no factor."""
    last = re.search(r"[0-9}] \([^()]*\)$", text)
    return last is not None and (has_words(last[0]) or _NOT_A_FACTOR.search(last[0]) is not None)


def bodies(text: str) -> list[str]:
    """Return the text, and the text without its lead-in, each once."""
    found = [text]
    lead = _LEAD_IN.match(text)
    if lead is not None and not _NO_LEAD_IN.search(lead[0]):
        found.append(text[lead.end() :])
    if verb := _VERB.match(text):
        found.append(text[verb.end() :])
    if (value := _after_a_name(text)) is not None:
        found.append(value)
    return list(dict.fromkeys(found))


def _after_a_name(text: str) -> str | None:
    """Return what stands after the first `=` outside braces when a name in LaTeX or `name(…)` stands before it."""
    depth = 0
    for mark in re.finditer(r"\\.|[{}=,;]", text):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0 and mark[0] in ("=", ",", ";"):
            name = re.sub(r"\{[^{}]*\}", "", text[: mark.start()])
            if mark[0] == "=" and _CALLED.fullmatch(name.strip()) and not _NO_LEAD_IN.search(name):
                return text[mark.end() :].lstrip()
            named = (
                mark[0] == "="
                and "\\" in name
                and not has_words(name)
                and not re.search(r"[<>]|\\(?:ne|le|ge|in)q?\b", name)
            )
            return text[mark.end() :].lstrip() if named else None
    return None


def may_be_left_out(
    remark: str, value: Fraction | None, is_same: Callable[[str], bool], *, words: bool = False
) -> bool:
    """Whether a remark after a value states no other value.

    Args:
        remark: from its first sign on.
        value: the value before it, when it is a rational number.
        is_same: whether a text is the value again.
        words: whether the value is words.
    """
    remark = _EXCLUDED.sub(" ", spoken_mathematics(remark))
    if _DENIES.search(remark) or _NO.fullmatch(remark):
        return False
    if words:
        return bool(_REASON.match(remark)) or not re.search(
            _HEDGES.pattern + r"|\b(?:yes|true|false)\b", remark, re.IGNORECASE
        )
    if not _VALUE_SIGN.search(remark):
        return not re.search(r"\bor [a-z]\b", remark)
    if rounded := _ROUNDED.fullmatch(remark):
        return value is None or _rounds_to(value, rounded["number"])
    again = _SAME_AGAIN.match(remark)
    if again is not None:
        rest = remark[again.end() :].rstrip(" ).")
        return is_same(rest) or _only_repeats(rest, value)
    if _HEDGES.search(remark) and not _REASON.match(remark):
        return _only_repeats(remark, value)
    if reason := _REASON.match(remark):
        rest = remark[reason.end() :].strip(" ).,")
        if re.search(r"\b(?:or|backup|instead|otherwise|actually|maybe|perhaps|alternatively)\b", rest, re.IGNORECASE):
            return _only_repeats(rest, value)
        # a reason is a sentence or an equation, and not one more value
        bare = _NUMBER.fullmatch(rest) is not None or reason[0].strip(" (,;:.").casefold() == "with"
        return not bare or _only_repeats(_CONDITION.sub(" ", rest), value)
    return _only_repeats(_OF_THEM.sub(" ", _CONDITION.sub(" ", remark)), value)


def _only_repeats(text: str, value: Fraction | None) -> bool:
    if re.search(r"\\(?:frac|sqrt|pi|infty)(?![A-Za-z])", text):
        return False
    return all(_rational(number[0]) == value for number in _NUMBER.finditer(text))


def _rounds_to(value: Fraction, text: str) -> bool:
    """Whether a decimal is the value to its last place, rounded or cut off."""
    decimal = _rational(text)
    return decimal is not None and abs(decimal - value) < Fraction(1, 10 ** len(text.partition(".")[2]))


def _rational(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", "")) if len(text) <= 100 else None
    except (ValueError, ZeroDivisionError):
        return None

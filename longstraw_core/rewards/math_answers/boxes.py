"""Boxes and the expression that a box stands in: `-\\boxed{5}` states −5 and `\\frac{\\boxed{5}}{2}` states 5/2."""

import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}(?:\{|(?P<single>[0-9A-Za-z](?![A-Za-z])|\\[A-Za-z]{1,20}))|\\[\\{}]|[{}]")
_WINDOW = 240
"""How far around a box its expression is looked for, in characters."""
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|hbox|mathrm|mathbf|emph|tag)\s*$")
_PIECE = re.compile(
    r"(?P<ends>\\(?:implies|iff|Rightarrow|rightarrow|Longrightarrow|Leftrightarrow|to|therefore|because|leq?"
    r"|geq?|neq?|approx"
    r"|equiv|sim|quad|qquad|in|boxed|fbox|newline|tag|hline|begin|end)(?![A-Za-z])|\\\\|\\[()\[\]]"
    r"|[=<>&:;?≈≤≥≠→⇒∴]|,(?![0-9]{3}(?![0-9]))"
    r"|\.(?![0-9])|\$\$?|\n)"
    r"|(?P<words>\\(?:text|textbf|textit|textrm|mbox|hbox|mathrm)\s*\{[^{}]*\}|(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z]))"
    r"|(?P<open>(?<!\\)\{)|(?P<close>(?<!\\)\})|(?P<other>\\[A-Za-z]+|\\.|\s+|.)",
    re.DOTALL,
)
_TAIL_END = re.compile(r"\n|\\(?:boxed|fbox)")
_TYPOGRAPHY = re.compile(
    r"\\(?:displaystyle|textstyle|left|right|bf|rm|large|Large|huge|color\s*\{[a-z]+\}|[!,;: ])(?![A-Za-z])|[\s*_`~$]"
)
_OPERATOR_BEFORE = re.compile(r"(?:[-+*/^−×·÷±]|\\(?:times|cdot|div|pm|mp|frac|sqrt))\s*$")
_OPERATOR_AFTER = re.compile(
    r"\s*(?:[+*/^×·÷²³!±]|[-−](?=\s*[0-9$\\(a-zA-Z]{1}(?![A-Za-z]))|\\(?:times|cdot|div|pm|sqrt|frac|pi)(?![A-Za-z]))"
)
_WORD_AFTER = re.compile(
    r"[\s$]*(?:\\[)\]])?[\s$]*(?:\\text\s*\{\s*)?(?P<word>°|%|\\%|percent|per ?cent|hundred|thousand"
    r"|[mbtr]+illion|dozen|gross|halves"
    r"|thirds|quarters|tenths|hundredths|factorial|squared|cubed|cents?|dollars?|euros?|[kcm]?m|[kc]?meters?"
    r"|kilometers?"
    r"|centimeters?|miles?|feet|inche?s?|seconds?|minutes?|hours?|days?|grams?|kg|kilograms?"
    r"|degrees?)(?![A-Za-z])\s*\}?"
    r"(?P<power>\s*\^\s*\{?[23]\}?)?",
    re.IGNORECASE,
)
_ANOTHER = re.compile(
    r"[\s$,;.]*(?:\\[)\]])?[\s$,;.]*(?:\\text\s*\{\s*)?\(?\s*(?:or|and|/|but|或"
    r"|和)(?![A-Za-z])[^\n]{0,12}?(?:[0-9]|\\frac|\\sqrt|\\pi)"
    r"|[\s$]*(?:\\[)\]])?[\s$]*[,;]\s*\$?[-+]?[0-9][0-9.,/]*\$?\s*$"
)
_ANOTHER_BEFORE = re.compile(r"\S{0,40}[0-9})]\$?\s*(?:\\text\s*\{\s*)?(?:\bor\b|\band\b|或|和)\s*\}?[\s$*_]*$")
_TAKEN_BACK = re.compile(
    r"\b(?:correction|i mean|i meant|actually|scratch that|should be|sorry|oops|rather|no wait"
    r"|wait)\b[^\n]{0,80}?[0-9]",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Box:
    """An outermost box."""

    start: int
    end: int
    content: str | None
    """None: the braces never close."""


def find_boxes(text: str) -> list[Box]:
    """Return every outermost `\\boxed{…}`, braces matched in one pass."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    stack: list[re.Match[str]] = []
    found: list[Box] = []
    for mark in _BOX.finditer(text):
        if mark["single"]:
            found.append(Box(mark.start(), mark.end(), mark["single"]))
        elif mark[0] == "}":
            if stack and (opening := stack.pop())[0] != "{":
                found.append(Box(opening.start(), mark.end(), text[opening.end() : mark.start()]))
        elif mark[0].endswith("{") and mark[0] != "\\{":
            stack.append(mark)
    found += [Box(opening.start(), opening.end(), None) for opening in stack if opening[0] != "{"]
    found.sort(key=lambda box: (box.start, -box.end))
    outermost: list[Box] = []
    for box in found:
        if not outermost or box.start >= outermost[-1].end:
            outermost.append(box)
    return outermost


def stated_by(text: str, box: Box, first: int, last: int) -> tuple[str, int]:
    """Return what a closed box states, with what is attached to it, and where that ends.

    Args:
        text: the response.
        box: the box.
        first: the expression begins here or later.
        last: and ends here or earlier.
    """
    content = box.content or ""
    if text.endswith("~~", 0, box.start) and text.startswith("~~", box.end):
        return f"~~{content}~~", box.end
    start, in_braces = _beginning(text, max(first, box.start - _WINDOW), box.start)
    end = _ending(text, box.end, min(last, box.end + _WINDOW), in_braces)
    before, after = text[start : box.start], text[box.end : end]
    if _TYPOGRAPHY.sub("", before) == "" and _TYPOGRAPHY.sub("", after) in ("", "!", "'", '"', ")", "|"):
        before = after = ""
        end = box.end
    tail = _TAIL_END.split(text[end : min(last, end + _WINDOW)], maxsplit=1)[0]
    if word := _WORD_AFTER.match(tail):
        # a unit, a percent sign or a number word after the box belongs to its value
        space = "" if word["word"] in ("%", "\\%", "°") else " "
        after, end = f"{after}{space}{word['word']}{word['power'] or ''}", end + word.end()
        tail = tail[word.end() :]
    if one_before := _ANOTHER_BEFORE.search(text[max(first, start - 60) : start]):
        before = re.sub(r"\$|\\text", " ", one_before[0]) + before
    if (another := _ANOTHER.match(tail)) or (another := _TAKEN_BACK.search(tail)):
        after += " ; or " + re.sub(r"[$\\]", " ", tail[: another.end()])
    if not before and not after:
        return content, end
    if before.strip() == "" and after in (" %", "%", "\\%"):
        return content + "\\%", end
    if before.rstrip().endswith("{") or not (before.strip() or _OPERATOR_AFTER.match(after)):
        inside = content
    elif before.rstrip().endswith(("}", "frac", "sqrt", "^", "_")):
        inside = "{" + content + "}"
    else:
        inside = f"({content})"
    return f"{before}{inside}{after}".strip(), end


def _beginning(text: str, first: int, start: int) -> tuple[int, int]:
    """Return where the expression that ends at `start` begins, and how many braces are open there."""
    begin = first
    opened: list[int] = []
    for piece in _PIECE.finditer(text, first, start):
        if piece["open"]:
            if _TEXT_COMMAND.search(text, max(first, piece.start() - 12), piece.start()):
                begin, opened = piece.end(), []
            else:
                opened.append(begin)
        elif piece["close"]:
            if opened:
                opened.pop()
            else:
                begin = piece.end()
        elif (piece["ends"] or piece["words"]) and (not opened or piece["ends"] in ("$", "$$", "\n")):
            begin, opened = piece.end(), []
    if opened:
        return opened[0], len(opened)
    return (begin, 0) if _attached(text, begin, start) else (start, 0)


def _attached(text: str, begin: int, start: int) -> bool:
    """Whether what stands between is part of the value: an operator or a factor, and no bullet, dash or label."""
    before = text[begin:start]
    bare = _TYPOGRAPHY.sub("", before)
    if not bare:
        return False
    previous = text[max(0, begin - 12) : begin].rstrip()
    if bare in ("-", "–", "—", "−", "+", "*"):
        spaced = before.endswith((" ", "\n"))
        after_word = previous[-1:].isalpha() and not re.search(r"\b(?:is|are|equals|be|gives|get)$", previous)
        bullet = not previous or text[begin - 1 : begin] == "\n"
        dash = spaced and (after_word or bullet) and not _in_mathematics(text, start)
        return not dash and bare not in ("–", "—", "*")
    if bare in "()[]|.,'\"#>":
        return False
    in_mathematics = _in_mathematics(text, start)
    if in_mathematics or _OPERATOR_BEFORE.search(before.rstrip("$ ")):
        return True
    return bool(re.search(r"[0-9)}A-Za-z]\$?$", before)) and not before.endswith(" ")


def _in_mathematics(text: str, place: int) -> bool:
    line = text[max(0, place - 600) : place]
    line = line[line.rfind("\n\n") + 1 :]
    return (
        line.replace("$$", "").count("$") % 2 == 1 or line.count("$$") % 2 == 1
        or line.rfind("\\(") > line.rfind("\\)") or line.rfind("\\[") > line.rfind("\\]")
    )  # fmt: skip


def _ending(text: str, end: int, last: int, in_braces: int) -> int:
    """Return where the expression that begins before `end` ends."""
    depth = in_braces
    stop = end
    for piece in _PIECE.finditer(text, end, last):
        if piece["open"]:
            depth += 1
        elif piece["close"]:
            depth -= 1
            if depth < 0:
                return stop
        elif ((piece["ends"] and piece["ends"] != "\n") or piece["words"]) and not depth:
            return stop if in_braces or stop == end or _operates(text, end, stop) else end
        elif piece["ends"] == "\n" and not depth:
            return stop if in_braces or _operates(text, end, stop) else end
        if depth == 0 and not (piece["other"] or "").isspace():
            stop = piece.end()
    return stop if in_braces or _operates(text, end, stop) else end


def _operates(text: str, end: int, stop: int) -> bool:
    """Whether what follows a box is part of the value."""
    after = text[end:stop]
    bare = _TYPOGRAPHY.sub("", after)
    if not bare or (bare in ("!", "!!") and not _in_mathematics(text, end)):
        return False
    if _OPERATOR_AFTER.match(after):
        return bool(re.search(r"[0-9A-Za-z²³!]", bare))
    return _in_mathematics(text, end) and bool(re.match(r"[0-9A-Za-z\\({^]", bare)) and not bare.startswith("\\\\")

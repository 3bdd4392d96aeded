"""Folds look-alike characters one by one into ASCII or LaTeX; deliberately not NFKC, which turns `4²` into 42."""

import re
import unicodedata

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
VULGAR_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
    "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8),
    "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
SINGLE = {
    **{chr(0xFF01 + offset): chr(0x21 + offset) for offset in range(94)},
    **dict.fromkeys("−﹣‐‑‒–—", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u3000\t", " "),
    **dict.fromkeys("\u2009\u202f\u2006\u2008", "\\,"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u00ad\u20e3", ""),
    **dict.fromkeys("“”„«»", '"'),
    **dict.fromkeys("‘’", "'"),
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "\\div ", "⁄": "/", "∕": "/", "∗": "*",
    "±": "\\pm ", "∓": "\\mp ", "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ",
    "∴": "\\therefore ", "→": "\\to ", "⇒": "\\Rightarrow ", "⟹": "\\Rightarrow ", "∎": "\\qed ",
    "≈": "\\approx ", "≃": "\\approx ", "∞": "\\infty ", "π": "\\pi ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "∅": "\\emptyset ", "°": "^\\circ ", "º": "^\\circ ", "√": "\\sqrt ",
    "∛": "\\cbrt ", "、": ",", "。": ". ", "…": "\\ldots ",
    "ℝ": "\\Reals ", "ℤ": "\\Integers ", "ℕ": "\\Naturals ", "ℚ": "\\Rationals ", "ℂ": "\\Complexes ",
    "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "ω": "\\omega ",
    "φ": "\\phi ", "μ": "\\mu ", "σ": "\\sigma ",
    **{character: f"\\tfrac{{{top}}}{{{bottom}}}" for character, (top, bottom) in VULGAR_FRACTIONS.items()},
}  # fmt: skip
_TABLE = str.maketrans(SINGLE)
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_MATHEMATICAL_ALPHABET = re.compile("[\U0001d400-\U0001d7ff]+")
"""Bold, italic and other letters and digits; here compatibility forms differ in nothing but style."""
_RADICAL = re.compile(r"([√∛])\s*([0-9]+(?:\.[0-9]+)?)")
"""All digits after `√` are under it, while `\\sqrt12` is √1 times 2."""
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")


def fold(text: str) -> str:
    """Return `text` with full-width forms, signs, superscripts and mathematical characters in ASCII or LaTeX."""
    if text.isascii():
        return text.replace("\t", " ")
    text = _MATHEMATICAL_ALPHABET.sub(lambda run: unicodedata.normalize("NFKC", run[0]), text)
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run[0].translate(SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + run[0].translate(SUBSCRIPTS) + "}", text)
    text = _RADICAL.sub(lambda root: ("\\sqrt" if root[1] == "√" else "\\cbrt") + "{" + root[2] + "}", text)
    return text.translate(_TABLE)

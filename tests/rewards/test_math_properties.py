"""Whole kinds, not cases: generated values in generated notations are right, their neighbours are wrong."""

from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longstraw_core.rewards.math_equality import MathScorer

SCORER = MathScorer(deadline_seconds=60.0, workers=1)
"""Everything here is decided without a worker; a test that needed one would start it."""
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])

integers = st.integers(-(10**9), 10**9)
naturals = st.integers(0, 10**12)
denominators = st.integers(2, 10**4)
fractions = st.builds(Fraction, st.integers(-(10**6), 10**6), denominators)
MINUS = st.sampled_from(["-", "−", "– ", "- "])
SPACING = st.sampled_from(["", " ", "\\,", "\\;", "\\!", "~", "\\quad ", "\\ "])
WRAPS = st.sampled_from(
    ["{}", "${}$", "$${}$$", "\\({}\\)", "\\[{}\\]", "**{}**", "`{}`", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "{}.",
     "${}$.",
     "{}<|im_end|>", "*{}*", " {} ", "\\text{{{}}}", "$\\displaystyle {}$", "x = {}", "= {}"]
)  # fmt: skip
LABELS = st.sampled_from(
    ["Answer: ", "Answer:", "**Answer:** ", "Final Answer: ", "**Final Answer**: ", "Answer：", "答案：", "ANSWER: ",
     "Answer:\n", "Answer:\n\n"]
)  # fmt: skip
BEFORE = st.sampled_from(["", "We count.\n\n", "<think>Maybe 5.\nAnswer: 5</think>\n", "Answer: 3\n\nNo, redo it.\n\n"])
AFTER = st.sampled_from(["", "\n", "\n\nThis was checked twice with other numbers, 12 and 13.", "</s>"])
FULL_WIDTH = str.maketrans("0123456789-+/.,%()=", "０１２３４５６７８９－＋／．，％（）＝")


def judged(response: str, truth: str) -> bool:
    (verdict,) = SCORER.judge([(response, truth)])
    assert verdict.status != "bad_row", (response, truth)
    return verdict.correct


def right(value: str, truth: str) -> None:
    assert judged(f"Answer: {value}", truth), (value, truth)


def wrong(value: str, truth: str) -> None:
    assert not judged(f"Answer: {value}", truth), (value, truth)


def latex(value: Fraction, command: str = "\\frac") -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


@QUICK
@given(integers, WRAPS, LABELS, BEFORE, AFTER)
def test_integers_in_any_dress(number: int, wrap: str, label: str, before: str, after: str) -> None:
    response = before + label + wrap.format(number) + after
    assert judged(response, str(number))
    assert not judged(response, str(number + 1))
    assert not judged(response, str(-number - 1))


@QUICK
@given(fractions, st.sampled_from(["\\frac", "\\dfrac", "\\tfrac"]), st.integers(1, 50), SPACING)
def test_fractions(value: Fraction, command: str, factor: int, space: str) -> None:
    expanded = f"{value.numerator * factor}/{value.denominator * factor}"
    notations = [latex(value, command), f"{value.numerator}{space}/{space}{value.denominator}", expanded]
    for notation in notations:
        right(notation, latex(value))
        right(f"${notation}$", str(value))
        wrong(notation, latex(value + Fraction(1, 10**6)))
        wrong(notation, latex(-value - 1))


@QUICK
@given(st.integers(-(10**8), 10**8), st.integers(0, 6), st.integers(0, 3))
def test_decimals_are_exact(digits: int, places: int, zeros: int) -> None:
    value = Fraction(digits, 10**places)
    sign = "-" if digits < 0 else ""
    whole, rest = divmod(abs(digits), 10**places)
    text = f"{sign}{whole}" + (f".{rest:0{places}d}" if places else "") + ("0" * zeros if places else "")
    right(text, f"{value.numerator}/{value.denominator}")
    wrong(text + ("1" if places else ".1"), f"{value.numerator}/{value.denominator}")


@QUICK
@given(st.integers(1, 10**4), st.sampled_from([3, 7, 9, 11, 13, 17, 21, 33, 99, 101]), st.integers(3, 12))
def test_a_rounded_decimal_is_not_the_exact_value(top: int, bottom: int, places: int) -> None:
    value = Fraction(top, bottom)
    if value.denominator != 1:
        wrong(f"{top / bottom:.{places}f}", latex(value))
        wrong(f"{top / bottom:.{places}f}…", latex(value))


@QUICK
@given(st.integers(0, 999), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1, max_size=6))
def test_repeating_decimals(whole: int, fixed: str, period: str) -> None:
    scale = 10 ** len(fixed)
    value = Fraction(int(f"{whole}{fixed}"), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    truth = f"{value.numerator}/{value.denominator}"
    right(f"${whole}.{fixed}\\overline{{{period}}}$", truth)
    right(f"{whole}.{fixed}({period})", truth)
    if int(period):
        wrong(f"{whole}.{fixed}{period}", truth)


@QUICK
@given(st.integers(-(10**6), 10**6), st.integers(0, 3))
def test_percent(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    text = str(digits) if not places else f"{digits / 10**places:.{places}f}"
    hundredth = value / 100
    right(f"${text}\\%$", f"{hundredth.numerator}/{hundredth.denominator}")
    right(f"{text}%", f"{text}\\%")
    if digits:
        wrong(text, f"{hundredth.numerator}/{hundredth.denominator}")
        wrong(f"{text}%", f"{value.numerator}/{value.denominator}")


@QUICK
@given(
    st.integers(1000, 10**12), st.sampled_from([",", "{,}", "\\,", "\\ ", "\u2009", "\u202f", "\u00a0", " ", ",\\!"])
)
def test_thousands_separators_stand_between_groups_of_three(number: int, separator: str) -> None:
    right(grouped(number, separator), str(number))
    right(f"${grouped(number, separator)}$", str(number))
    right(str(number), grouped(number, separator))
    digits = str(number)
    wrong(f"{digits[:-2]}{separator}{digits[-2:]}", digits)
    wrong(f"{digits[:-1]}{separator}{digits[-1:]}", digits)


@QUICK
@given(st.lists(st.integers(0, 99), min_size=2, max_size=5))
def test_a_list_is_not_the_number_its_digits_spell(numbers: list[int]) -> None:
    joined = "".join(map(str, numbers))
    for separator in (",", ", ", " ", "; ", " or ", " and "):
        if not any(numbers):
            continue
        wrong(separator.join(map(str, numbers)), joined)
        wrong(f"${separator.join(map(str, numbers))}$", joined)


@QUICK
@given(st.integers(1, 10**9), MINUS)
def test_signs(number: int, minus: str) -> None:
    right(f"{minus}{number}", f"-{number}")
    right(f"${minus}{number}$", f"-{number}")
    right(f"+{number}", str(number))
    wrong(f"{minus}{number}", str(number))
    wrong(f"\\pm {number}", str(number))
    right(f"\\pm {number}", f"{number}, -{number}")


@QUICK
@given(st.integers(0, 10**6), fractions)
def test_full_width_characters(number: int, value: Fraction) -> None:
    right(str(number).translate(FULL_WIDTH), str(number))
    right(f"{value.numerator}/{value.denominator}".translate(FULL_WIDTH), latex(value))


@QUICK
@given(st.integers(2, 99), st.integers(2, 9))
def test_superscripts_are_powers_and_not_digits(base: int, exponent: int) -> None:
    superscript = str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    right(f"{base}{superscript}", str(base**exponent))
    right(f"${base}^{{{exponent}}}$", str(base**exponent))
    wrong(f"{base}{superscript}", f"{base}{exponent}")


@QUICK
@given(st.integers(1, 10**4), st.integers(1, 20), st.integers(2, 21), st.booleans())
def test_mixed_numbers(whole: int, top: int, bottom: int, negative: bool) -> None:
    if top >= bottom:
        return
    value = (whole + Fraction(top, bottom)) * (-1 if negative else 1)
    sign = "-" if negative else ""
    for notation in (f"{sign}{whole} {top}/{bottom}", f"${sign}{whole}\\frac{{{top}}}{{{bottom}}}$",
                     f"${sign}{whole}\\,\\tfrac{{{top}}}{{{bottom}}}$"):  # fmt: skip
        right(notation, latex(value))
        wrong(notation, f"{sign}{whole}")
        wrong(notation, latex(whole * Fraction(top, bottom)))
    wrong(f"{whole}\\cdot\\frac{{{top}}}{{{bottom}}}", latex(whole + Fraction(top, bottom)))


@QUICK
@given(
    integers,
    st.sampled_from(["apples", "cm", "\\text{ cm}", "\\,\\mathrm{m}", "km/h", "square units", "cm^2", "\\text{ m}^3",
                     "dollars", "degrees", "students in the class", "ways", "hours per day"]),
)  # fmt: skip
def test_units_are_left_out(number: int, unit: str) -> None:
    right(f"{number} {unit}", str(number))
    right(str(number), f"{number} {unit}")
    wrong(f"{number} {unit}", str(number + 1))


@QUICK
@given(
    fractions, fractions, st.sampled_from(["()", "[]", "(]", "[)"]), st.sampled_from(["()", "[]", "(]", "[)"]), SPACING
)
def test_intervals(low: Fraction, high: Fraction, brackets: str, others: str, space: str) -> None:
    interval = f"{brackets[0]}{latex(low)},{latex(high)}{brackets[1]}"
    right(f"$\\left{brackets[0]}{low},{space}{high}\\right{brackets[1]}$", interval)
    if others != brackets:
        wrong(f"{others[0]}{low}, {high}{others[1]}", interval)
    if low != high:
        wrong(f"{brackets[0]}{high}, {low}{brackets[1]}", interval)
    signs = {"(": "<", "[": "\\le", ")": "<", "]": "\\le"}
    right(f"${low} {signs[brackets[0]]} x {signs[brackets[1]]} {high}$", interval)


@QUICK
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_sets_have_no_order_and_miss_nothing(numbers: list[int], random: object) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    truth = "\\{" + ",".join(map(str, numbers)) + "\\}"
    right("$\\{" + ", ".join(map(str, shuffled)) + "\\}$", truth)
    right(", ".join(map(str, shuffled)), ", ".join(map(str, numbers)))
    wrong("$\\{" + ", ".join(map(str, shuffled[1:])) + "\\}$", truth)
    wrong(str(numbers[0]), truth)
    wrong(", ".join(map(str, shuffled)), str(numbers[0]))
    wrong("(" + ", ".join(map(str, numbers[::-1])) + ")", "(" + ", ".join(map(str, numbers)) + ")")


@QUICK
@given(st.lists(integers, min_size=2, max_size=5), st.sampled_from([" ", "\n", " or ", ", ", "$ and $", "; "]))
def test_several_boxes_are_one_answer_only_when_they_agree(numbers: list[int], between: str) -> None:
    boxes = between.join(f"\\boxed{{{number}}}" for number in numbers)
    for response in (boxes, f"So it is {boxes}.", f"Answer: {boxes}"):
        assert judged(response, str(numbers[-1])) == (len(set(numbers)) == 1)


@QUICK
@given(integers, integers, LABELS)
def test_the_answer_outside_the_thinking_block_counts(inside: int, outside: int, label: str) -> None:
    thought = f"<think>\nFirst guess.\n{label}{inside}\n"
    assert judged(f"{thought}</think>\n\n{label}{outside}", str(outside))
    assert judged(f"{thought}</think>\n\n{label}{outside}", str(inside)) == (inside == outside)
    assert not judged(f"{thought}</think>\n\nSo that is it.", str(inside))
    assert not judged(thought, str(inside))
    assert not judged(f"{label}{inside}\n<think>\nwait", str(inside))


@QUICK
@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 60), st.integers(1, 200))
def test_radicals_have_one_normal_form(factor: int, radicand: int, other: int, bottom: int) -> None:
    value = f"\\frac{{{factor}\\sqrt{{{radicand}}}}}{{{bottom}}}"
    right(f"$\\sqrt{{\\frac{{{factor * factor * radicand}}}{{{bottom * bottom}}}}}$", value)
    right(f"$\\frac{{{factor * radicand}}}{{{bottom}\\sqrt{{{radicand}}}}}$", value)
    equal = factor * factor * radicand == other * other * radicand
    assert judged(f"Answer: $\\frac{{{other}\\sqrt{{{radicand}}}}}{{{bottom}}}$", value) == equal
    right(f"${factor}\\pi+\\sqrt{{{radicand}}}$", f"\\sqrt{{{radicand}}}+{factor}\\pi")


@QUICK
@given(st.text(max_size=200), st.integers(-99, 99))
def test_no_text_at_all_makes_it_fail(text: str, truth: int) -> None:
    for response in (text, f"Answer: {text}", f"\\boxed{{{text}}}"):
        (verdict,) = SCORER.judge([(response, str(truth))])
        assert verdict.status in ("ok", "no_answer", "timeout")


SIGNS = [
    *(
        "1",
        "42",
        "0",
        "x",
        "e",
        "i",
        " ",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "^",
        "_",
        "!",
        "%",
        "|",
        ",",
        "=",
        "<",
        "-",
        "+",
    ),
    *("/", "*", ":", "&", "'", "$", "°", "\\\\", "\\{", "\\}", "\\frac", "\\sqrt", "\\left", "\\pm", "\\cup", "\\pi"),
    *("\\infty", "\\sin", "\\log", "\\begin{pmatrix}", "\\end{pmatrix}", "\\boxed{", "\\text{", "\\quad"),
]
FRAGMENTS = st.lists(st.sampled_from(SIGNS), max_size=40)


@settings(QUICK, max_examples=400)
@given(FRAGMENTS)
def test_no_arrangement_of_mathematical_signs_makes_it_fail(parts: list[str]) -> None:
    from longstraw_core.rewards.math_answers.comparison import same_answer
    from longstraw_core.rewards.math_answers.limits import OverLimit, Unreadable
    from longstraw_core.rewards.math_answers.reading import read_answer, read_truth

    try:
        reading = read_answer("".join(parts))
        if reading.node is not None:
            truth = read_truth("1").node
            assert truth is not None
            same_answer(truth, reading.node)
            assert same_answer(reading.node, reading.node) is not False
    except (Unreadable, OverLimit):
        pass

"""Generated values: boxes inside expressions, remarks, units, words and sets, each beside an oracle of its own."""

from fractions import Fraction

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from longstraw_core.rewards.math_equality import MathScorer

SCORER = MathScorer(deadline_seconds=60.0, workers=1)
"""Everything here is decided without a worker."""
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DELIMITERS = st.sampled_from(["${}$", "$$\n{}\n$$", "\\( {} \\)", "\\[\n{}\n\\]", "{}"])
OPENINGS = st.sampled_from(["Answer: ", "So we get ", "Hence the total is ", "", "**Answer:** ", "Therefore, "])
small = st.integers(1, 60)


def judged(response: str, truth: str) -> bool:
    (verdict,) = SCORER.judge([(response, truth)])
    assert verdict.status != "bad_row", (response, truth)
    return verdict.correct


def text(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


@QUICK
@given(small, st.integers(2, 9), OPENINGS, DELIMITERS)
def test_a_box_states_the_expression_it_stands_in(inner: int, other: int, opening: str, delimiters: str) -> None:
    box = f"\\boxed{{{inner}}}"
    around = {
        f"-{box}": Fraction(-inner),
        f"{box}/{other}": Fraction(inner, other),
        f"{other}{box}": Fraction(inner * other),
        f"{box}^{other % 3 + 2}": Fraction(inner ** (other % 3 + 2)),
        f"\\frac{{{box}}}{{{other}}}": Fraction(inner, other),
        f"\\frac{{{other}}}{{{box}}}": Fraction(other, inner),
        f"x = \\frac{{{box}}}{{{other}}}": Fraction(inner, other),
        f"{other} + {box}": Fraction(inner + other),
        f"{box} - {other}": Fraction(inner - other),
        f"{other}\\cdot{box}": Fraction(inner * other),
        f"{box}\\%": Fraction(inner, 100),
        f"x = {other} \\cdot {inner} / {other} = {box}": Fraction(inner),
        f"{box}\\text{{ cm}}": Fraction(inner),
    }
    for expression, value in around.items():
        response = opening + delimiters.format(expression)
        assert judged(response, text(value)), (response, value)
        assert judged(response, str(inner)) == (value == inner), (response, inner)


OTHER_VALUES = st.sampled_from(
    ["{0} (I mean {1})", "{0}. Correction: {1}", "{0} with {1} as backup", "{0} for n even, {1} for n odd",
    "{0} or {1}",
     "{0} (or {1})", "{0}, maybe {1}", "{0}; alternatively {1}", "{0} (actually {1})", "{0}, i.e. {1}", "{0} - no, {1}",
     "{0} if n = 1, {1} if n = 2", "{0} with remainder {1}", "{0}. Or {1}.", "{0}, wait, {1}", "{0} = {1}",
     "{0} to {1}",
     "{0} and {1}", "{0} otherwise {1}", "either {1} or {0}", "{0}, {1}", "{0}/{1}", "{0} hundred and {1}"]
)  # fmt: skip


@QUICK
@given(st.integers(2, 99), st.integers(2, 99), OTHER_VALUES, st.sampled_from(["{}", "${}$", "**{}**"]))
def test_text_with_another_value_is_not_simply_the_first(first: int, second: int, form: str, dress: str) -> None:
    assume(first != second)
    assert not judged("Answer: " + dress.format(form.format(first, second)), str(first))


@QUICK
@given(st.integers(2, 99), st.integers(2, 99), st.integers(2, 99))
def test_reasons_and_repetitions_do_not_hide_the_value(value: int, left: int, step: int) -> None:
    for remark in (f" (since {value - left} + {left} = {value})", f", because there are {left} of them",
    " (see step 2)",
                   f", not {value + step}", f" instead of {value + step}", f", i.e. {2 * value}/2", f" when n = {step}",
                   f" as {value - left}+{left}={value}", f". So {value} is the answer.", " (checked)"):  # fmt: skip
        assert judged(f"Answer: {value}{remark}", str(value)), remark
        assert not judged(f"Answer: {value}{remark}", str(value + 1)), remark


TABLES = [
    [("mm", Fraction(1, 1000)), ("cm", Fraction(1, 100)), ("meters", Fraction(1)), ("km", Fraction(1000)),
     ("inches", Fraction(254, 10_000)), ("feet", Fraction(3048, 10_000)), ("miles", Fraction(1_609_344, 1000))],
    [("grams", Fraction(1)), ("kg", Fraction(1000)), ("mg", Fraction(1, 1000)), ("pounds", Fraction(45_359_237,
    10**5))],
    [("seconds", Fraction(1)), ("minutes", Fraction(60)), ("hours", Fraction(3600)), ("days", Fraction(86_400))],
    [("dollars", Fraction(1)), ("cents", Fraction(1, 100))],
    [("cm^2", Fraction(1, 10**4)), ("square meters", Fraction(1)), ("km^2", Fraction(10**6))],
    [("km/h", Fraction(1000, 3600)), ("meters per second", Fraction(1)), ("mph", Fraction(1_609_344, 3_600_000))],
]  # fmt: skip


@QUICK
@given(st.sampled_from(TABLES), st.data(), st.integers(1, 500))
def test_units_are_converted_exactly_or_conflict(
    table: list[tuple[str, Fraction]], data: st.DataObject, n: int
) -> None:
    (unit, scale), (other, other_scale) = data.draw(st.sampled_from(table)), data.draw(st.sampled_from(table))
    converted = n * scale / other_scale
    assert judged(f"Answer: {text(converted)} {other}", f"{n} {unit}")
    assert judged(f"Answer: {n} {other}", f"{n} {unit}") == (scale == other_scale)
    assert judged(f"Answer: {n}", f"{n} {unit}")
    assert judged(f"Answer: {n} {unit}", str(n))
    foreign = data.draw(st.sampled_from([row[0] for rows in TABLES if rows is not table for row in rows]))
    assert not judged(f"Answer: {n} {foreign}", f"{n} {unit}")


ONES = (
    "zero one two three four five six seven eight nine ten eleven "
    "twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def spelled(number: int) -> str:
    if number < 20:
        return ONES.split()[number]
    if number < 100:
        return TENS.split()[number // 10 - 2] + ("-" + spelled(number % 10) if number % 10 else "")
    for size, name in ((10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            joint = " and " if size == 100 else " "
            return f"{spelled(number // size)} {name}" + (joint + spelled(rest) if rest else "")
    raise AssertionError


@QUICK
@given(st.integers(0, 10**7), st.integers(2, 500))
def test_numbers_in_words(number: int, count: int) -> None:
    assert judged(f"Answer: {spelled(number)}", str(number))
    assert judged(f"Answer: {number}", spelled(number))
    assert not judged(f"Answer: {spelled(number)}", str(number + 1))
    for word, factor in (("dozen", 12), ("million", 10**6), ("trillion", 10**12), ("hundred", 100), ("percent",
    Fraction(1, 100)),
                         ("per cent", Fraction(1, 100)), ("halves", Fraction(1, 2)), ("tenths", Fraction(1, 10)),
                         ("squared", count), ("thirds", Fraction(1, 3))):  # fmt: skip
        assert judged(f"Answer: {count} {word}", text(Fraction(count) * factor)), word
        assert not judged(f"Answer: {count} {word}", str(count)), word


WORD_LIST = "none all of above no solution isosceles right triangle even odd prime yes exists on off first second"
WORDS = st.lists(
    st.sampled_from(WORD_LIST.split()),
    min_size=1, max_size=4,
)  # fmt: skip


@QUICK
@given(WORDS, WORDS, st.sampled_from(["{}", "{}.", "**{}**", "\\text{{{}}}", "the {}", " {} ", "{}!"]))
def test_words_are_text(first: list[str], second: list[str], dress: str) -> None:
    truth = " ".join(first)
    assert judged("Answer: " + dress.format(truth.title()), truth)
    assert judged("Answer: " + dress.format(truth.upper()), truth)
    assert judged(f"Answer: {' '.join(second)}", truth) == (first == second)
    letters = sorted("".join(first))
    assume("".join(letters) != truth)
    assert not judged(f"Answer: {''.join(letters)}", truth)


ENDS = st.lists(st.integers(-20, 20), min_size=4, max_size=8, unique=True).map(sorted)


@QUICK
@given(ENDS, st.data())
def test_unions_have_one_normal_form(ends: list[int], data: st.DataObject) -> None:
    pieces = [
        f"{data.draw(st.sampled_from('(['))}{low}, {high}{data.draw(st.sampled_from(')]'))}"
        for low, high in zip(ends[::2], ends[1::2], strict=False)
    ]
    union = "\\cup".join(pieces)
    assert judged(f"Answer: ${'∪'.join(data.draw(st.permutations(pieces)))}$", union)
    assert not judged(f"Answer: ${pieces[0]}$", union)
    low, middle, high = ends[:3]
    assert judged(f"Answer: $[{low},{middle}]\\cup({middle},{high}]$", f"[{low},{high}]")
    assert not judged(f"Answer: $[{low},{middle})\\cup({middle},{high}]$", f"[{low},{high}]")
    assert judged(f"Answer: $x \\ne {low}$", f"(-\\infty,{low})\\cup({low},\\infty)")
    assert judged(f"Answer: $\\mathbb{{R}}\\setminus\\{{{middle},{low}\\}}$",
                  f"(-\\infty,{low})\\cup({low},{middle})\\cup({middle},\\infty)")  # fmt: skip
    assert judged(f"Answer: $x<{low}$ or $x \\ge {high}$", f"[{high},\\infty)\\cup(-\\infty,{low})")
    assert judged(f"Answer: $\\{{x \\mid x > {low}\\}}$", f"({low},\\infty)")


@QUICK
@given(st.integers(0, 4000), st.integers(2, 9), st.integers(2, 40))
def test_digits_in_a_base_and_residues(number: int, base: int, modulus: int) -> None:
    digits, rest = "", number
    while rest or not digits:
        digits, rest = str(rest % base) + digits, rest // base
    assert judged(f"Answer: ${digits}_{{{base}}}$", str(number))
    assert judged(f"Answer: ${digits}_{base}$", f"{digits}_{base}")
    assert not judged(f"Answer: ${digits}_{base}$", str(number + 1))
    assert judged(f"Answer: ${number + modulus} \\pmod{{{modulus}}}$", f"{number} \\pmod{{{modulus}}}")
    assert not judged(f"Answer: ${number + 1} \\pmod{{{modulus}}}$", f"{number} \\pmod{{{modulus}}}")


@QUICK
@given(st.integers(1, 10**6), st.sampled_from(["≈{}", "~{}", "\\approx {}", "about {}", "approximately {}",
"x \\approx {}",
                                                "roughly {}", "{}...", "{}\\ldots", "~~{}~~", "\x00{}",
                                                "{}…"]))  # fmt: skip
def test_an_approximate_unfinished_or_struck_value_is_not_exact(number: int, form: str) -> None:
    assert not judged("Answer: " + form.format(number), str(number))

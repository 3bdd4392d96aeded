"""`math_verify` gives a mathematician's verdict: on the project's cases and on the whole kind behind each of them."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rewards.math_equality import MathScorer
from longstraw_core.rewards.verdict import Verdict

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "reward_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


def stated(value: str) -> str:
    return f"Working through the casework.\n\nAnswer: {value}"


def verdict(scorer: MathScorer, response: str, truth: str) -> Verdict:
    (found,) = scorer.judge([(response, truth)])
    return found


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_projects_cases_get_a_mathematicians_verdict(math_scorer: MathScorer, case: dict[str, Any]) -> None:
    started = time.monotonic()
    found = verdict(math_scorer, case["response"], case["ground_truth"])
    if case["expect"] == "error":
        assert found.status == "bad_row"
    else:
        assert found.correct is case["expect"]
        assert found.status != "bad_row"
    assert time.monotonic() - started < case.get("limit_s", 60)


EQUAL = [
    ("$\\tfrac{7}{12}$", "\\frac{7}{12}"), ("7/12", "\\dfrac{7}{12}"), ("\\frac12", "0.5"), ("\\frac{3}4", "0.75"),
    ("12.0", "12"), ("12.", "12"), (".5", "1/2"), ("4.2e3", "4200"), ("$4.2\\times10^3$", "4200"), ("+7", "7"),
    ("- 7", "-7"), ("–7", "-7"), ("7／８", "7/8"), ("1,234", "1234"), ("$1{,}234{,}567$", "1234567"),
    ("1 000 000", "1000000"), ("12\u202f345", "12345"), ("(10,000, 20,000)", "(10000, 20000)"),
    ("25%", "25\\%"), ("0.25", "25\\%"), ("$25\\%$ of them", "0.25"), ("$\\boxed{25}\\%$", "0.25"),
    ("45°", "45"), ("$45^\\circ$", "45"), ("$\\sin 30^\\circ$", "1/2"), ("12 cm", "12"), ("12cm", "12"),
    ("$12\\,\\mathrm{cm}^2$", "12"), ("10 km/h", "10"), ("\\$12", "12"), ("12 dollars", "12"), ("12", "12 cm"),
    ("5 m", "5"), ("x = 5", "5"), ("5", "x=5"), ("m+n=5", "5"), ("2 + 3 = 5", "5"), ("$f(x)=x+1$", "x+1"),
    ("$\\frac{1}{3} \\approx 0.333$", "1/3"), ("$2\\frac{2}{3}$", "\\frac83"), ("-3 1/2", "-3.5"), ("3½", "7/2"),
    ("½", "0.5"), ("0.1\\overline{6}", "1/6"), ("0.(142857)", "1/7"), ("`42`", "42"), ('"42"', "42"), ("42</s>", "42"),
    ("42<|eot_id|>", "42"), ("\\[ 42 \\]", "42"), ("*42*", "42"),
    ("$\\textbf{42}$", "42"), ("\\boxed{\\boxed{7}}", "7"),
    ("The total number of ways is 42.", "42"), ("42, because 6*7=42", "42"), ("$42$ (mod $100$)", "42"),
    ("$0.75 = \\frac{3}{4}$", "3/4"), ("42 or 42", "42"), ("$\\sqrt{8}$", "2\\sqrt2"), ("√8", "2\\sqrt{2}"),
    ("2√12", "4\\sqrt3"), ("∛27", "3"),
    ("$\\frac{1}{\\sqrt2}$", "\\frac{\\sqrt{2}}{2}"), ("$\\frac{1}{1+\\sqrt2}$", "\\sqrt2-1"), ("2^3^2", "512"),
    ("$\\sqrt[3]{-8}$", "-2"), ("$(x+1)^2$", "x^2+2x+1"), ("x²", "x^2"), ("3+4i", "4i+3"), ("$i^2$", "-1"),
    ("$\\sqrt{3+2\\sqrt2}$", "1+\\sqrt2"), ("$\\cos(\\pi/3)$", "1/2"), ("$\\log_2 8$", "3"), ("$e^{i\\pi}$", "-1"),
    ("10!", "3628800"), ("$\\binom{10}{3}$", "120"), ("|-3|", "3"), ("2, 1", "1,2"), ("$[1,2)$", "[1,2)"),
    ("$(-\\infty, 3) \\cup [5, \\infty)$", "[5,\\infty)\\cup(-\\infty,3)"), ("$x>3$", "(3,\\infty)"),
    ("$1\\le x<2$", "[1,2)"), ("$x \\in [1,2]$", "[1,2]"), ("$\\{1,2\\}$", "1, 2"), ("$\\pm 2$", "-2, 2"),
    ("$x=1$ or $x=2$", "1,2"), ("$y=3x+13$", "3x-y+13=0"), ("6x - 2y + 26 = 0", "3x-y+13=0"), ("∞", "\\infty"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"), ("3:4", "3:4"),
    ("Even.", "even"), ("Area = 42 cm²", "42"),
    ("36, i.e. 6^2 = 36", "36"), ("36 since 6^2 = 36", "36"),
    ("7th", "7"), ("$x<1$ or $x>3$", "(-\\infty,1)\\cup(3,\\infty)"), ("$(x,y)=(1,2)$", "(1,2)"), ("(B)", "B"),
    ("B", "\\text{(B)}"), ("forty-two", "42"), ("9^{9^{9}}", "9^{9^9}"),
]  # fmt: skip

DIFFERENT = [
    ("12,34", "1234"), ("1,2,3", "123"), ("4 2", "42"), ("3 4", "34"), ("$3$ $4$", "34"), ("25", "0.25"), ("25%", "25"),
    ("5x", "5"), ("5 x", "5"), ("12 cm", "12 m"), ("2 + 4 = 5", "5"), ("0.\\overline{6}", "0.6"), ("2 2/3", "2"),
    ("15 or 16", "15"), ("15 or 16", "16"), ("$\\frac{1}{21!}$", "\\frac{1}{20!}"), ("1", "\\{2,1\\}"), ("1", "1,2"),
    ("(2,1)", "(1,2)"), ("$(1,2)$", "[1,2]"), ("3x - y + 13 = 0", "0"), ("1, 2, 3", "1,2"),
    ("$\\{1,2\\}$", "\\{1,2,3\\}"),
    ("$\\pm 2$", "2"), ("$2\\pi$", "6.28"), ("6.283185307", "2\\pi"), ("≈ 0.33", "1/3"), ("about 42", "42"),
    ("not 42", "42"), ("42. Or maybe 24.", "42"), ("7 or more", "7"), ("5 apples and 3 pears", "5"), ("7-", "7"),
    ("$\\frac{0}{0}$", "0"), ("1/0", "0"), ("-∞", "\\infty"), ("∞", "0"), ("odd", "even"), ("forty-two", "24"),
    ("(a) 3 (b) 4", "3"), ("3; 4", "3"), ("print(7)", "7"), ("lambda: 7", "7"), ("x=5", "y=5"), ("3½", "31/2"),
    ("$\\sqrt{3+2\\sqrt2}$", "1+\\sqrt3"), ("4\\sqrt(2)", "4"), ("$x$", "y"), ("$|x|$", "x"), ("\\sqrt{x^2}", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "truth"), EQUAL)
def test_the_same_value_in_another_form_is_right(math_scorer: MathScorer, value: str, truth: str) -> None:
    found = verdict(math_scorer, stated(value), truth)
    assert (found.reward, found.correct, found.status) == (1.0, True, "ok"), found


@pytest.mark.parametrize(("value", "truth"), DIFFERENT)
def test_another_value_is_wrong_however_alike_it_looks(math_scorer: MathScorer, value: str, truth: str) -> None:
    found = verdict(math_scorer, stated(value), truth)
    assert (found.reward, found.correct) == (-1.0, False), found
    assert found.status in ("ok", "no_answer")


@pytest.mark.parametrize("truth", ["", "  ", "$$", "\\boxed{}", "\\frac{1}{", "???", "{", "1/0", "nan", "3 4 5", "1 +"])
def test_a_bad_ground_truth_is_an_error_of_the_row(math_scorer: MathScorer, truth: str) -> None:
    assert math_scorer.truth_problem(truth) is not None
    assert verdict(math_scorer, "Answer: 1", truth).status == "bad_row"


TOO_LARGE = ["$9^{9^{9^{9}}}$", "9**9**9", "$99999!$", "$10^{10}!$", "$\\binom{1000000000}{500000000}$",
             "$\\int_0^1 \\sin(x^2) e^{x^3} dx$", "$\\sum_{k=1}^{1000000000} \\frac{1}{k}$",
             "$2^{999999}-2^{999999}+9$"]  # fmt: skip
HOSTILE = [
    stated("(" * 3000 + "1" + ")" * 3000),
    stated("9" * 200_000),
    stated("$" + "\\frac{1}{1+" * 120 + "1" + "}" * 120 + "$"),
    stated("-" * 1500 + "1"),
    stated("1" + "!" * 1500),
    stated("x" + "^x" * 700),
    stated("±1" * 300),
    stated("$" + "\\sqrt{" * 400 + "1" + "}" * 400 + "$"),
    stated("$(1+x+y+z+a+b+c)^{250}$"),
    stated("a" * 1_000_000),
    "\\boxed{" * 3000,
    "answer " * 20_000,
    "Answer: " * 20_000,
    "Answer: \\boxed{" * 3000,
    "<think>" * 20_000,
    "\n" * 100_000 + "Answer:" + "\n" * 100_000,
    "Answer:" + " *" * 50_000,
    "$" * 100_000,
    stated("\ud800"),
    stated("\x00\x1b[2J"),
    stated("__import__('os').system('touch /tmp/longstraw-was-here')"),
]


@pytest.mark.parametrize("value", TOO_LARGE)
def test_a_value_beyond_the_limits_is_undecided_and_not_wrong(math_scorer: MathScorer, value: str) -> None:
    started = time.monotonic()
    found = verdict(math_scorer, stated(value), "9")
    assert (found.correct, found.status, found.rule) == (False, "timeout", "math_verify:over_limit")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_hostile_text_is_judged_quickly(math_scorer: MathScorer, place: int) -> None:
    started = time.process_time()
    assert not verdict(math_scorer, HOSTILE[place], "1").correct
    assert time.process_time() - started < 2
    assert not Path("/tmp/longstraw-was-here").exists()  # noqa: S108


def test_one_response_does_not_change_anothers_verdict(math_scorer: MathScorer) -> None:
    pairs = [(stated(value), truth) for value, truth in [*EQUAL, *DIFFERENT]]
    alone = [verdict(math_scorer, *pair) for pair in pairs[::7]]
    assert math_scorer.judge(pairs)[::7] == alone


def test_the_verdicts_depend_neither_on_order_nor_on_the_number_of_workers() -> None:
    pairs = [(stated(value), truth) for value, truth in [*EQUAL, *DIFFERENT]] + [(text, "1") for text in HOSTILE]
    with MathScorer(deadline_seconds=60.0, workers=1) as one, MathScorer(deadline_seconds=60.0, workers=3) as three:
        assert one.judge(pairs) == three.judge(pairs[::-1])[::-1]


def test_it_works_off_the_main_thread_and_leaves_the_callers_alarm_alone() -> None:
    import signal

    found: list[Verdict] = []

    def work() -> None:
        with MathScorer(deadline_seconds=60.0, workers=1) as scorer:
            found.append(verdict(scorer, stated("$\\sqrt{3+2\\sqrt2}$"), "1+\\sqrt2"))

    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert 300 < signal.getitimer(signal.ITIMER_REAL)[0] < 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert found[0].correct


def test_a_comparison_that_does_not_end_is_killed_at_its_deadline_and_the_next_one_is_scored() -> None:
    slow = "$\\sum_{k=1}^{9998} \\frac{1}{k}$"
    with MathScorer(deadline_seconds=0.3, workers=1) as scorer:
        first, second = scorer.judge(
            [(stated(slow), "\\sum_{k=1}^{9999} \\frac{1}{k}"), (stated("$\\cos(\\pi/3)$"), "1/2")]
        )
    assert (first.correct, first.status, first.rule) == (False, "timeout", "math_verify:deadline")
    assert (second.correct, second.status) == (True, "ok")


@pytest.mark.parametrize(("value", "truth"), [*EQUAL, *DIFFERENT])
def test_an_extracted_answer_extracts_to_itself(math_scorer: MathScorer, value: str, truth: str) -> None:
    first = verdict(math_scorer, stated(value), truth)
    if first.status == "ok" and first.extracted is not None:
        again = verdict(math_scorer, stated(first.extracted), truth)
        assert (again.extracted, again.correct) == (first.extracted, first.correct)

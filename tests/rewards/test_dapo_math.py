"""The DAPO rule gives the published verdicts, also where they are wrong, and stays fast on hostile text."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_core.rewards.dapo_math import NO_ANSWER, Variant, normalize_answer, score_response, truth_problem
from longstraw_core.rewards.overlong import overlong_penalty

PUBLISHED = Path(__file__).parent / "data" / "dapo_published_verdicts.jsonl"


def test_every_recorded_verdict_of_the_published_file_is_reproduced() -> None:
    """The file was recorded by running verl's math_dapo.py on random pieces of its own vocabulary and on real cases."""
    compared = 0
    for line in PUBLISHED.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        verdict = score_response(case["response"], case["ground_truth"], case["variant"])
        if verdict.status == "bad_row":
            continue
        compared += 1
        extracted = NO_ANSWER if verdict.extracted is None else verdict.extracted
        assert (verdict.correct, extracted) == (case["correct"], case["pred"]), case
        assert verdict.reward == (1.0 if case["correct"] else -1.0)
    assert compared > 250


@pytest.mark.parametrize(
    ("response", "truth", "correct", "extracted"),
    [
        ("so the sum is\nAnswer: 42", "42", True, "42"),
        ("answer : 42", "42", True, "42"),
        ("Answer: 41\nAnswer: 42", "42", True, "42"),
        ("Answer:\n\n42", "42", True, "42"),
        ("the reanswer: 42", "42", True, "42"),
        ("Answer: x = 42", "42", True, "42"),
        ("Answer: $42$ or $24$", "42", True, "42"),
        ("Answer: 1, 2", "12", True, "12"),
        ("Answer: 40,320 square meters", "40320", True, "40320"),
        (r"Answer: $\boxed{\frac12}$", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        (r"Answer: $\boxed{\frac{1}{2}}$", r"\frac12", True, r"\frac{1}{2}"),
        (r"Answer: 90^\circ", "90", True, "90"),
        (r"Answer: \text{(A)}", "(A)", True, "(A)"),
        (r"Answer: \boxed{18}.", "18", False, "18."),
        ("Answer: 12.0", "12", False, "12.0"),
        ("Answer\uff1a42", "42", False, None),
        ("it is 42", "42", False, None),
        ("", "42", False, None),
        ("Answer:", "42", False, None),
        ("Answer: 42" + " " * 300, "42", False, None),
        ("Answer: 42\n" + "x" * 289, "42", True, "42"),
        ("Answer: 42\n" + "x" * 290, "42", False, None),
    ],
)
def test_the_label_variant(response: str, truth: str, correct: bool, extracted: str | None) -> None:
    verdict = score_response(response, truth, "label")
    assert (verdict.correct, verdict.extracted) == (correct, extracted)
    assert verdict.reward == (1.0 if correct else -1.0)
    assert verdict.status == ("no_answer" if extracted is None else "ok")
    assert verdict.rule == "dapo_math:label"


@pytest.mark.parametrize(
    ("response", "truth", "correct", "extracted"),
    [
        (r"\boxed{42}", "42", True, "42"),
        (r"\boxed{41} then \boxed{42}.", "42", True, "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        (r"\boxed{ 42}", "42", False, " 42"),
        (r"\boxed{42} \boxed{4", "42", False, None),
        (r"\boxed{}", "42", False, ""),
        (r"\boxed 42", "42", False, None),
        ("Answer: 42", "42", False, None),
        (r"\boxed{42}" + "x" * 90, "42", True, "42"),
        (r"\boxed{42}" + "x" * 91, "42", False, None),
    ],
)
def test_the_strict_box_variant(response: str, truth: str, correct: bool, extracted: str | None) -> None:
    verdict = score_response(response, truth, "strict_box")
    assert (verdict.correct, verdict.extracted) == (correct, extracted)
    assert verdict.status == ("no_answer" if extracted is None else "ok")
    assert verdict.rule == "dapo_math:strict_box"


@pytest.mark.parametrize("variant", ["label", "strict_box"])
@pytest.mark.parametrize("truth", ["", " ", "[INVALID]"])
def test_an_unusable_truth_is_a_bad_row_and_never_a_reward(variant: Variant, truth: str) -> None:
    assert truth_problem(truth, variant) is not None
    for response in ("", f"Answer: {truth}", r"\boxed{" + truth + "}"):
        verdict = score_response(response, truth, variant)
        assert (verdict.status, verdict.correct, verdict.reward) == ("bad_row", False, -1.0)


@pytest.mark.parametrize("truth", ["$$", "units", r"\text{}", "x =", "square meters"])
def test_a_truth_that_normalises_to_nothing_is_a_bad_row(truth: str) -> None:
    assert score_response("Answer: $$", truth, "label").status == "bad_row"


@pytest.mark.parametrize("variant", ["label", "strict_box"])
@pytest.mark.parametrize(
    "text",
    [
        "answer" * 20_000,
        "Answer:" * 20_000,
        "Answer" + " " * 100_000,
        "Answer:" + " \t" * 50_000,
        "$" * 100_000,
        "x" * 100_000,
        r"\text{" * 20_000,
        r"\text{}" * 20_000,
        r"\boxed{" * 20_000,
        "{" * 100_000,
        "frac" * 25_000,
        "1" * 100_000,
    ],
)
def test_hostile_text_costs_linear_time_as_response_and_as_truth(text: str, variant: Variant) -> None:
    started = time.perf_counter()
    score_response(text, "42", variant)
    score_response("Answer: 42", text, variant)
    score_response(text, text, variant)
    assert time.perf_counter() - started < 1.0


@settings(deadline=None)
@given(st.integers())
def test_every_integer_is_accepted_for_itself(value: int) -> None:
    assert score_response(f"thinking\nAnswer: {value}", str(value), "label").correct
    assert score_response(f"\\boxed{{{value}}}", str(value), "strict_box").correct
    assert not score_response(f"Answer: {value}", str(value + 1), "label").correct


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from(list("Answer: $\\{}=,.12frac\n\u00b2"))), st.text())
def test_any_text_is_scored_without_an_exception(response: str, truth: str) -> None:
    for variant in ("label", "strict_box"):
        verdict = score_response(response, truth, variant)
        assert verdict.reward in (-1.0, 1.0)
        assert verdict.correct == (verdict.reward == 1.0)


def test_only_what_counts_as_digits_loses_its_commas() -> None:
    assert normalize_answer("1,234,567") == "1234567"
    assert normalize_answer("(1,2)") == "(1,2)"
    assert normalize_answer(",") == ","


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20480, -1.0), (24576, -1.0)],
)
def test_the_overlong_penalty_is_the_papers_and_clamped(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_tokens=20480, cache_tokens=4096) == penalty


def test_the_overlong_penalty_refuses_impossible_settings() -> None:
    for tokens, limit, cache in ((-1, 8, 4), (1, 4, 5), (1, 4, 0)):
        with pytest.raises(ValueError, match="overlong_penalty"):
            overlong_penalty(tokens, max_tokens=limit, cache_tokens=cache)

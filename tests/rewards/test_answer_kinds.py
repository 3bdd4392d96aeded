"""Tables of answers by kind, each with a mathematician's verdict: around the value, its unit, its notation, its box.

Each line of `data/answer_kinds.jsonl` has a ground truth, answers that are right and answers that are wrong; they are
written after `Answer: `, or are whole responses.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rewards.math_equality import MathScorer
from longstraw_core.rewards.verdict import Verdict

TABLE = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "answer_kinds.jsonl").read_text(encoding="utf-8").splitlines()
]


def judged(scorer: MathScorer, row: dict[str, Any], answers: list[str]) -> list[tuple[str, Verdict]]:
    opening = "" if row["whole_response"] else "We work through the cases.\n\nAnswer: "
    verdicts = scorer.judge([(opening + answer, row["ground_truth"]) for answer in answers])
    return list(zip(answers, verdicts, strict=True))


@pytest.mark.parametrize("row", TABLE, ids=[f"{row['kind']}:{row['ground_truth']}" for row in TABLE])
def test_every_notation_gets_a_mathematicians_verdict(math_scorer: MathScorer, row: dict[str, Any]) -> None:
    for answer, verdict in judged(math_scorer, row, row["right"]):
        assert (verdict.correct, verdict.status) == (True, "ok"), (answer, verdict)
    for answer, verdict in judged(math_scorer, row, row["wrong"]):
        assert not verdict.correct, (answer, verdict)
        assert verdict.status != "bad_row", (answer, verdict)


@pytest.mark.parametrize("row", TABLE, ids=[f"{row['kind']}:{row['ground_truth']}" for row in TABLE])
def test_an_extracted_value_keeps_its_verdict(math_scorer: MathScorer, row: dict[str, Any]) -> None:
    """What stands under `extracted` states the same when it is scored again, so a file can be scored from it."""
    for answer, verdict in judged(math_scorer, row, row["right"]):
        if verdict.extracted is None or "; " in verdict.extracted or len(verdict.extracted) > 100:
            continue
        (again,) = math_scorer.judge([(f"Answer: {verdict.extracted}", row["ground_truth"])])
        assert again.correct, (answer, verdict, again)


BAD_TRUTHS = ["", "  ", "$$", "\\boxed{}", "\\frac{1}{", "???", "{", "1/0", "nan", "3 4 5", "1 +", "N/A", "\\text{}",
              "-", "=", "$", "\\", "{}", "()", "\\frac", "x=", "1,,2", "\\sqrt{", "**", "...", "0/0",
              "null"]  # fmt: skip


@pytest.mark.parametrize("truth", BAD_TRUTHS)
def test_a_ground_truth_that_is_no_value_is_reported(math_scorer: MathScorer, truth: str) -> None:
    (verdict,) = math_scorer.judge([("Answer: 1", truth)])
    assert verdict.status == "bad_row"


GOOD_TRUTHS = ["None of the above", "isosceles triangle", "no solution", "101_2", "3 \\pmod{5}", "\\{x \\mid x > 3\\}",
               "July 4, 2020", "\\mathbb{Z}", "10:30 AM", "x \\equiv 2 \\pmod 7", "\\text{Yes}", "(B)",
              "does not exist",
               "all real numbers", "\\{x \\in \\mathbb{Z} \\mid x > 3\\}", "2k\\pi, k \\in \\mathbb{Z}"]  # fmt: skip


@pytest.mark.parametrize("truth", GOOD_TRUTHS)
def test_a_ground_truth_in_words_or_with_sets_is_a_value(math_scorer: MathScorer, truth: str) -> None:
    (verdict,) = math_scorer.judge([(f"Answer: {truth}", truth)])
    assert (verdict.correct, verdict.status) == (True, "ok"), verdict

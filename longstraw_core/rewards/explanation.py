"""Puts a verdict into words: what the rule that decided it means and what the ground truth was read as."""

from typing import Any

from longstraw_core.rewards import dapo_math
from longstraw_core.rewards.math_answers.limits import OverLimit, Unreadable
from longstraw_core.rewards.math_answers.reading import read_truth
from longstraw_core.rewards.math_equality import canonical_text
from longstraw_core.rewards.verdict import Verdict
from longstraw_core.spec.transaction import RewardSpec

MEANINGS = {
    "integer": "both are whole numbers and were compared exactly",
    "rational": "both are rational numbers and were compared exactly, without rounding",
    "exact": "compared by exact arithmetic with radicals, π and symbols",
    "structure": "lists, intervals, sets, equations or matrices, compared part by part",
    "same_form": "the texts are the same but for typography",
    "text": "the ground truth is words; compared without regard to case, punctuation and articles",
    "symbolic": "exact arithmetic could not tell; sympy compared them in a worker process",
    "library": "outside our grammar; math-verify read and compared them in a worker process",
    "several_values": "several values were stated, and not all of them are the ground truth",
    "another_value": "beside the value stands something that may be another value",
    "approximate": "a value that is called approximate; the ground truth is exact",
    "unit": "the units cannot be converted into each other",
    "choice": "the letter of the choice was compared",
    "unclosed_think": "the thinking block never ended, so nothing after it states an answer",
    "unclosed_box": "the last statement is a box whose braces never close",
    "empty_statement": "the last label or box states nothing",
    "no_statement": "there is no labelled line and no box",
    "unreadable": "what is stated is not one mathematical value",
    "over_limit": "the value is too large to be computed; not known to be right or wrong",
    "deadline": "the comparison was stopped at its deadline; not known to be right or wrong",
    "worker_died": "the worker process died during the comparison (memory); not known to be right or wrong",
    "undecided": "neither equality nor difference could be proven",
    "bad_truth": "the ground truth is not one mathematical value: an error of the row, not of the response",
    "label": "the last `Answer:` of the last 300 characters, normalised, compared as text",
    "strict_box": "the last box of the last 100 characters, compared as text",
    "truncated": "the response reached the length limit, and reward.truncated is no_answer",
}
"""What the last part of a rule's name means."""


def explain_verdict(verdict: Verdict, ground_truth: str | None, reward: RewardSpec) -> dict[str, Any]:
    """Return what `longstraw rewards explain` adds to a score line."""
    return {
        "answer_value": verdict.canonical,
        "ground_truth": ground_truth,
        "ground_truth_value": _truth_value(ground_truth or "", reward),
        "because": MEANINGS.get(verdict.rule.split(":")[-1], "the function of kind python decided"),
    }


def _truth_value(ground_truth: str, reward: RewardSpec) -> str | None:
    if reward.kind == "dapo_math":
        return dapo_math.normalize_answer(ground_truth) if reward.variant == "label" else ground_truth
    if reward.kind == "python":
        return None
    try:
        return canonical_text(read_truth(ground_truth))
    except (Unreadable, OverLimit):
        return None

"""What counts as the stated answer: the last label or box after the thinking block, all of it, or nothing."""

import pytest

from longstraw_core.rewards.math_answers.extraction import AnswerFormat, final_answer

CASES: list[tuple[str, tuple[str, ...]]] = [
    ("Answer: 42", ("42",)),
    ("**Answer:** 42", ("42",)),
    ("**Final Answer**: 42", ("42",)),
    ("answer : 42", ("42",)),
    ("Answer (in cm): 42", ("42",)),
    ("答案：42", ("42",)),
    ("Answer：42", ("42",)),
    ("## Answer\n\n42", ("42",)),
    ("The answer is 42.", ("42.",)),
    ("Answer:\n\n$$\n42\n$$", ("$$\n42\n$$",)),
    ("Answer: 42\n\n" + "More remarks. " * 50, ("42",)),
    ("Answer: 10\n\nWrong, redo.\n\nAnswer: 12", ("12",)),
    ("Answer: 10\nAnswer: 12", ("10", "12")),
    ("Answer: 10\n\nso \\boxed{12}", ("12",)),
    ("Answer: 10\n\n\\boxed{12}", ("10", "12")),
    ("so \\boxed{\\frac{1}{2}}", ("\\frac{1}{2}",)),
    ("so \\fbox{7}", ("7",)),
    ("\\boxed{3} and later text.\n\nFinally \\boxed{4}", ("4",)),
    ("\\boxed{3}\n\\boxed{4}", ("3", "4")),
    ("Either \\boxed{3} it may be \\boxed{4}", ("3", "4")),
    ("\\boxed{4}. So it is \\boxed{4}", ("4",)),
    ("\\boxed{\\boxed{7}}", ("\\boxed{7}",)),
    ("Answer: \\boxed{25}\\%", ("25\\%",)),
    ("Answer: 3 or \\boxed{4}", ("3 or (4)",)),
    ("<think>Answer: 3</think>\n\nAnswer: 8", ("8",)),
    ("no opening tag</think>Answer: 8", ("8",)),
    ("42", ("42",)),
    ("\\frac{1}{2}", ("\\frac{1}{2}",)),
]

NOTHING = [
    ("Answer: 17\n\nNo.\n\nAnswer:", "empty_statement"),
    ("Answer: \\boxed{}", "empty_statement"),
    ("Answer: **", "empty_statement"),
    ("<think>Answer: 21", "unclosed_think"),
    ("<think>a</think>Answer: 3<think>", "unclosed_think"),
    ("so \\boxed{\\frac{1}{2}", "unclosed_box"),
    ("Answer: 3\n\nso \\boxed{4", "unclosed_box"),
    ("First this.\nThen that.", "no_statement"),
    ("", "no_statement"),
    ("I answered it:\nyes", "no_statement"),
]


@pytest.mark.parametrize(("response", "values"), CASES)
def test_the_last_statement_is_found(response: str, values: tuple[str, ...]) -> None:
    assert tuple(value.strip() for value in final_answer(response).values) == tuple(value.strip() for value in values)


@pytest.mark.parametrize(("response", "why"), NOTHING)
def test_nothing_is_found_with_the_reason(response: str, why: str) -> None:
    found = final_answer(response)
    assert (found.values, found.rule) == ((), why)


@pytest.mark.parametrize(("answer_format", "values"), [("any", ("4",)), ("label", ("3",)), ("box", ("4",))])
def test_the_format_decides_what_states_an_answer(answer_format: AnswerFormat, values: tuple[str, ...]) -> None:
    assert final_answer("Answer: 3\n\nHence we get \\boxed{4}", answer_format).values == values
    assert final_answer("42", answer_format).values == (("42",) if answer_format == "any" else ())

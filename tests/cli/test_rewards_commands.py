"""`longstraw rewards` as people and scripts use it, and every command that docs/rewards.md shows."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from longstraw_core.cli.main import main

ROOT = Path(__file__).parent.parent.parent
CASES = "tests/rewards/data/reward_cases.jsonl"
SHOWN = re.findall(r"^\$ longstraw (.+)$", (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8"), re.MULTILINE)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["rewards", *arguments])


def answers(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("command", SHOWN)
def test_every_command_of_the_documentation_works(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert result.output


def test_a_pipe_is_refused_because_the_file_is_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    both_ends = os.open(pipe, os.O_RDWR)
    try:
        os.write(both_ends, b'{"id": 1, "response": "Answer: 1", "ground_truth": "1"}\n')
        result = invoke("score", "--kind", "dapo_math", "--in", str(pipe))
    finally:
        os.close(both_ends)
    assert result.exit_code == 2
    assert "a pipe" in result.output


def test_the_summary_names_the_rule_as_it_is_written(tmp_path: Path) -> None:
    path = answers(tmp_path, {"id": 1, "response": "Answer: 1", "ground_truth": "1"})
    result = invoke("score", "--kind", "dapo_math", "--in", path)
    assert "dapo_math:label: 1 of 1 correct" in result.output


def test_the_documentation_shows_commands() -> None:
    assert len(SHOWN) >= 5


def test_each_line_is_scored_in_order_with_the_six_fields(tmp_path: Path) -> None:
    path = answers(
        tmp_path,
        {"id": "a", "response": "Answer: 3/4", "ground_truth": "0.75", "other": 1},
        {"id": 2, "response": "Answer: 42 or 24", "ground_truth": "42"},
        "",
        {"id": "c", "response": "nothing\nhere", "ground_truth": "42"},
        {"id": "d", "response": "Answer: $9^{9^{9^{9}}}$", "ground_truth": "9"},
        {"id": "e", "response": "Answer: 1", "ground_truth": ""},
        {"id": "f", "response": "Answer: 1", "ground_truth": None},
        {"id": "g", "response": "Answer: 1"},
    )
    result = invoke("score", "--kind", "math_verify", "--in", path, "-o", "json")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert records[0] == {
        "id": "a",
        "score": 1.0,
        "correct": True,
        "status": "ok",
        "extracted": "3/4",
        "rule": "math_verify:rational",
    }
    assert [record["id"] for record in records] == ["a", 2, "c", "d", "e", "f", "g"]
    assert [record["status"] for record in records] == ["ok", "ok", "no_answer", "timeout", *["bad_row"] * 3]
    assert [record["score"] for record in records] == [1.0, -1.0, -1.0, -1.0, None, None, None]
    table = invoke("score", "--kind", "math_verify", "--in", path)
    assert "math_verify: 1 of 7 correct; 2 ok, 1 no_answer, 1 timeout, 3 bad_row" in table.output


def test_the_published_rule_names_its_variant(tmp_path: Path) -> None:
    path = answers(tmp_path, {"id": "a", "response": "Answer: \\boxed{42}", "ground_truth": "42"})
    for variant in ("label", "strict_box"):
        result = invoke("score", "--kind", "dapo_math", "--variant", variant, "--in", path, "-o", "json")
        record = json.loads(result.stdout)
        assert (record["score"], record["rule"]) == (1.0, f"dapo_math:{variant}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "answers.jsonl:2: not JSON"),
        ("[1]", "answers.jsonl:2: not an object"),
        ('{"response": "x", "ground_truth": "1"}', "answers.jsonl:2: id is missing"),
        ('{"id": "x", "ground_truth": "1"}', "answers.jsonl:2: response is missing"),
    ],
)
def test_a_bad_line_is_refused_before_anything_is_scored(tmp_path: Path, line: str, message: str) -> None:
    path = answers(tmp_path, {"id": "a", "response": "Answer: 1", "ground_truth": "1"}, line)
    result = invoke("score", "--kind", "math_verify", "--in", path, "-o", "json")
    assert result.exit_code == 10
    (error,) = [json.loads(text) for text in result.stdout.splitlines()]
    assert message in error["message"]


def test_a_missing_file_and_a_missing_function_are_usage_errors(tmp_path: Path) -> None:
    path = answers(tmp_path, {"id": "a", "response": "x", "ground_truth": "1"})
    absent = invoke("score", "--kind", "math_verify", "--in", str(tmp_path / "absent.jsonl"))
    assert (absent.exit_code, "absent.jsonl" in absent.output) == (2, True)
    assert invoke("score", "--kind", "python", "--in", path).exit_code == 2
    unknown = invoke("score", "--kind", "python", "--function", "no.such:thing", "--in", path)
    assert (unknown.exit_code, "no module named no" in unknown.output) == (2, True)
    assert invoke("score", "--kind", "guess", "--in", path).exit_code == 2


def test_a_verdict_is_explained_with_both_values(tmp_path: Path) -> None:
    result = invoke(
        *("explain", "--kind", "math_verify", "--response", "Answer: 0.5", "--ground-truth", "\\frac12", "-o", "json")
    )
    shown = json.loads(result.stdout)
    assert (shown["answer_value"], shown["ground_truth_value"], shown["correct"]) == ("1/2", "1/2", True)
    assert "compared exactly" in shown["because"]
    assert invoke("explain", "--kind", "math_verify", "--response", "x").exit_code == 2
    path = answers(tmp_path, {"id": 7, "response": "Answer: 1", "ground_truth": "1"})
    assert invoke("explain", "--kind", "dapo_math", "--in", path, "--id", "7").exit_code == 0
    assert invoke("explain", "--kind", "dapo_math", "--in", path, "--id", "8").exit_code == 10


def test_hostile_text_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = answers(tmp_path, {"id": "\x1b[2J", "response": "Answer: \x1b[31m\ud800 42", "ground_truth": "42"})
    for command in (("score",), ("explain", "--id", "\x1b[2J")):
        result = invoke(*command, "--kind", "dapo_math", "--in", path)
        assert result.exit_code == 0, result.output
        assert "\x1b[2J" not in result.output
        assert "\x1b[31m" not in result.output

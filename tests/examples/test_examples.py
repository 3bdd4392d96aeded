"""The example data: generated rows have the promised shape and bytes, committed rows match their converter."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from longstraw_core.spec import TransactionSpec
from longstraw_core.training.tiny.tokenizer import build_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_dapo_schema(row: dict[str, Any]) -> None:
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["data_source"] == "math_dapo"
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert set(row["reward_model"]) == {"ground_truth", "style"}
    assert re.fullmatch("-?[0-9]+", row["reward_model"]["ground_truth"])
    assert isinstance(row["extra_info"]["index"], str)


def test_recall_rows_are_long_repeatable_and_answered_by_their_prompt(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        done = run("recall/generate.py", "--out", tmp_path / name, "--rows", 6, "--seed", seed)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
    tokenizer = build_tokenizer()
    rows = read_rows(tmp_path / "a")
    assert len(rows) == len({row["prompt"][0]["content"] for row in rows}) == 6
    for row in rows:
        assert_dapo_schema(row)
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert 2048 <= len(ids) < 2064
        truth = re.findall(r"^code final=(\d+)$", row["prompt"][0]["content"], flags=re.MULTILINE)
        assert truth == [row["reward_model"]["ground_truth"]]
        decoy = re.findall(r"^code draft=(\d+)$", row["prompt"][0]["content"], flags=re.MULTILINE)
        assert len(decoy) == 1
        assert decoy != truth


def test_more_rows_extend_fewer_rows(tmp_path: Path) -> None:
    for rows in (2, 3):
        run("recall/generate.py", "--out", tmp_path / str(rows), "--rows", rows, "--min-tokens", 200)
    assert read_rows(tmp_path / "3")[:2] == read_rows(tmp_path / "2")


def test_recall_prompts_can_be_tens_of_thousands_of_tokens(tmp_path: Path) -> None:
    done = run("recall/generate.py", "--out", tmp_path / "rows", "--rows", 1, "--min-tokens", 30000)
    assert done.returncode == 0, done.stderr
    ids = build_tokenizer().apply_chat_template(read_rows(tmp_path / "rows")[0]["prompt"])["input_ids"]
    assert len(ids) >= 29990


def test_no_rows_is_a_usage_error(tmp_path: Path) -> None:
    assert run("recall/generate.py", "--out", tmp_path / "rows", "--rows", 0).returncode == 2
    assert not (tmp_path / "rows").exists()


def test_the_recall_transaction_is_a_valid_specification() -> None:
    spec = TransactionSpec.model_validate(yaml.safe_load((EXAMPLES / "recall" / "transaction.yaml").read_text()))
    assert spec.objective.gradient == "exact"
    assert spec.sampling.group_size == 8
    assert spec.schedule.transactions >= 6


def test_committed_gsm8k_rows_have_the_schema_and_their_licence() -> None:
    rows = read_rows(EXAMPLES / "gsm8k" / "rows.jsonl")
    assert len(rows) == len({row["extra_info"]["index"] for row in rows}) == 64
    for row in rows:
        assert_dapo_schema(row)
    assert (rows[0]["reward_model"]["ground_truth"], rows[2]["reward_model"]["ground_truth"]) == ("18", "70000")
    assert "Copyright (c) 2021 OpenAI" in (EXAMPLES / "gsm8k" / "LICENSE").read_text()


def test_the_converter_takes_the_integer_after_the_marks(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    answers = ["1+1=<<1+1=2>>2\n#### 2", "minus\n#### -1,250", "#### 3\nno, rather\n#### 70,000 "]
    source.write_text("".join(json.dumps({"question": "é?", "answer": text}) + "\n" for text in answers))
    done = run("gsm8k/convert.py", source, "--out", tmp_path / "rows.jsonl", "--rows", 9)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "-1250", "70000"]
    assert all("é?" in row["prompt"][0]["content"] for row in rows)


@pytest.mark.parametrize(
    "line", ["{}", "[]", "not json", '{"question": "q", "answer": "#### 2.5"}', '{"question": "q", "answer": "2"}']
)
def test_a_bad_source_line_is_named_and_nothing_is_written(tmp_path: Path, line: str) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(json.dumps({"question": "q", "answer": "#### 1"}) + "\n" + line + "\n")
    done = run("gsm8k/convert.py", source, "--out", tmp_path / "rows.jsonl")
    assert done.returncode == 2
    assert f"{source}:2: not a GSM8K row" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]

"""The audit names every bad row, tokenizes with the snapshot's tokenizer and selects prompts reproducibly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rewards import row_sources
from longstraw_core.rewards.audit import Audit, audit_rows
from longstraw_core.rewards.prompt_tokens import load_prompt_tokenizer, prompt_token_limit, read_model_limits
from longstraw_core.rewards.scoring import truth_check
from longstraw_core.spec import DataRefused, SpecError, canonical_json
from longstraw_core.spec.transaction import DataSpec, RewardSpec

from .conftest import Rows, dapo_row


def one_token_per_letter(messages: list[dict[str, str]]) -> list[int]:
    return [ord(letter) % 128 for message in messages for letter in message["content"]]


def audited(path: Path, **changes: Any) -> Audit:
    settings: dict[str, Any] = {"per_transaction": 1, "duplicates": "drop", "shuffle": True} | changes
    return audit_rows(
        path,
        data=DataSpec(
            path="rows.jsonl",
            prompts_per_transaction=settings["per_transaction"],
            duplicates=settings["duplicates"],
            shuffle=settings["shuffle"],
        ),
        seed=settings.get("seed", 0),
        transaction=settings.get("transaction", 1),
        tokenize=settings.get("tokenize", one_token_per_letter),
        token_limit=settings.get("token_limit", 100),
        vocabulary=settings.get("vocabulary", 128),
        check_truth=truth_check(RewardSpec()),
        shown_as="rows.jsonl",
    )


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(DataRefused) as caught:
        audited(path, **changes)
    return str(caught.value)


def test_a_sound_row_becomes_a_prompt_with_its_ids_and_a_report(rows_file: Rows) -> None:
    index = "6e32c1f8-1f0a-4e1b-9d0f-000000000001"
    result = audited(rows_file([dapo_row(extra_info={"index": index})]))
    (prompt,) = result.prompts
    assert prompt.prompt_id == index
    assert prompt.token_ids == tuple(one_token_per_letter([{"content": "What is 6 * 7?"}]))
    assert (prompt.ground_truth, prompt.data_source, prompt.row) == ("42", "math_dapo", 0)
    report = result.report
    assert (report.rows, report.eligible, report.duplicates_found) == (1, 1, 0)
    assert report.prompt_tokens.max == report.prompt_tokens.total == len(prompt.token_ids)
    assert json.loads(canonical_json(report)) == report.to_json_object()


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert refusal(path) == "rows.jsonl: no rows in the file; write one JSON object per line"


def test_a_missing_file_or_a_directory_is_an_error_of_the_specification(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(SpecError, match=r"data\.path must name a JSONL or Parquet file"):
            audited(path)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b"{not json", "row: not JSON"),
        (b"[1, 2]", "row: is a list, expected an object"),
        (b"\xff\xfe{}", "row: not UTF-8 at byte 0"),
        (b'{"a": 1, "a": 2}', "row: not JSON: key 'a' appears twice"),
        (b'{"a": NaN}', "row: not JSON: NaN is not a JSON number"),
        (b"[" * 200_000, "row: not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "row: not JSON"),
        (dapo_row(prompt="What?"), "prompt: is a string, expected a list of chat messages"),
        (dapo_row(prompt=[]), "prompt: is an empty list"),
        (dapo_row(prompt=["What?"]), "prompt[0]: is a string, expected a chat message"),
        (dapo_row(prompt=[{"role": "user"}]), "prompt[0].content: is missing"),
        (dapo_row(prompt=[{"role": "user", "content": 3}]), "prompt[0].content: is a number"),
        (dapo_row(prompt=[{"role": "robot", "content": "x"}]), "prompt[0].role: is 'robot'"),
        (dapo_row(prompt=[{"role": ["user"], "content": "x"}]), "prompt[0].role: is ['user']"),
        (dapo_row(prompt=[{"role": "user", "content": "x", "name": "y"}]), "prompt[0]: unknown key 'name'"),
        (dapo_row(prompt=[{"role": "assistant", "content": "x"}]), "prompt: last message has role 'assistant'"),
        (dapo_row(" \n"), "prompt[0].content: is empty"),
        (dapo_row("bell \a"), "prompt[0].content: control character U+0007 at character 5"),
        (dapo_row("\x00"), "prompt[0].content: control character U+0000"),
        (dapo_row("a\x85"), "prompt[0].content: control character U+0085"),
        (dapo_row("half \ud800"), "prompt[0].content: half of a surrogate pair U+D800"),
        (dapo_row(truth=None), "reward_model.ground_truth: is missing"),
        (dapo_row(truth=42), "reward_model.ground_truth: is a number 42, expected a string"),
        (dapo_row(truth=True), "reward_model.ground_truth: is a boolean True"),
        (dapo_row(truth=""), "reward_model.ground_truth: is empty"),
        (dapo_row(truth="  "), "reward_model.ground_truth: is empty"),
        (dapo_row(truth="$$"), "reward_model.ground_truth: '$$' is empty after normalisation"),
        (dapo_row(truth="4\x7f2"), "reward_model.ground_truth: control character U+007F"),
        (dapo_row(reward_model=None), "reward_model.ground_truth: is missing"),
        (dapo_row(reward_model="42"), "reward_model.ground_truth: not there: reward_model is a string"),
        (dapo_row(data_source=None), "data_source: is null, expected a string"),
        ({k: v for k, v in dapo_row().items() if k != "data_source"}, "data_source: is missing"),
        (dapo_row(ability=1), "ability: is a number, expected a string"),
        (dapo_row(extra_info=[]), "extra_info: is a list, expected an object"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(rows_file: Rows, row: Any, expected: str) -> None:
    message = refusal(rows_file([dapo_row(), row]))
    assert message.startswith(f"rows.jsonl:2: {expected}")
    assert "; " in message
    assert "\n" not in message


def test_tabs_line_ends_and_other_scripts_are_text(rows_file: Rows) -> None:
    assert audited(rows_file([dapo_row("a\tb\r\nc é 数 \U0001f600")])).report.rows == 1


def test_all_bad_rows_are_reported_and_the_list_is_bounded(rows_file: Rows) -> None:
    rows = [dapo_row(f"question {number}", truth="") for number in range(25)]
    lines = refusal(rows_file([dapo_row(), *rows])).splitlines()
    assert lines[0] == "rows.jsonl: 25 problems in 25 rows; nothing was computed"
    assert [line.split(": ")[0] for line in lines[1:21]] == [f"rows.jsonl:{line}" for line in range(2, 22)]
    assert lines[21:] == ["... and 5 more"]


def test_all_problems_of_one_row_are_reported(rows_file: Rows) -> None:
    message = refusal(rows_file([{"prompt": [], "ability": 3}]))
    assert all(name in message for name in ("prompt", "reward_model.ground_truth", "data_source", "ability"))


def test_a_hostile_value_cannot_break_the_message(rows_file: Rows) -> None:
    message = refusal(rows_file([dapo_row(prompt=[{"role": "x\n\x1b[2J" + "y" * 10_000, "content": "z"}])]))
    assert len(message) < 300
    assert message.isprintable()


def test_a_line_that_is_too_long_is_refused_without_losing_count(
    rows_file: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sources, "MAX_ROW_BYTES", 400)
    message = refusal(rows_file([dapo_row(), dapo_row("x" * 5000), dapo_row(truth="")]))
    assert "rows.jsonl:2: row: longer than 400 bytes" in message
    assert "rows.jsonl:3: reward_model.ground_truth: is empty" in message


def test_prompts_beyond_the_limit_and_foreign_token_ids_are_refused(rows_file: Rows) -> None:
    path = rows_file([dapo_row("x" * 50), dapo_row("y" * 51), dapo_row("z" * 60)])
    message = refusal(path, token_limit=50)
    assert "rows.jsonl:2: prompt: 51 tokens after the chat template, at most 50 are allowed" in message
    assert "rows.jsonl:3: prompt: 60 tokens" in message
    assert audited(path, token_limit=60).report.prompt_tokens.max == 60
    assert "token id 120 is outside the model's vocabulary of 120" in refusal(path, vocabulary=120)
    assert "no tokens after the chat template" in refusal(path, tokenize=lambda _: [])


def test_rows_that_no_transaction_has_selected_yet_are_checked_too(rows_file: Rows) -> None:
    rows = [dapo_row(f"question {number}") for number in range(20)] + [dapo_row("x" * 500)]
    for transaction in range(1, 20):
        assert "rows.jsonl:21: prompt: 500 tokens" in refusal(rows_file(rows), transaction=transaction)


@pytest.mark.parametrize("policy", ["fail", "drop", "keep"])
def test_conflicting_ground_truths_are_refused_whatever_the_policy(rows_file: Rows, policy: str) -> None:
    message = refusal(rows_file([dapo_row(), dapo_row("other"), dapo_row(truth="41")]), duplicates=policy)
    assert message.startswith(
        "rows.jsonl:3: reward_model.ground_truth: '41' contradicts the ground truth of the same prompt on line 1"
    )


def test_exact_duplicates_follow_the_policy(rows_file: Rows) -> None:
    path = rows_file([dapo_row(), dapo_row("other"), dapo_row(), dapo_row(truth="42 ")])
    dropped = audited(path, duplicates="drop").report
    assert (dropped.rows, dropped.unique_prompts, dropped.eligible) == (4, 2, 2)
    assert (dropped.duplicates_found, dropped.duplicates_dropped) == (2, 2)
    kept = audited(path, duplicates="keep", per_transaction=4)
    assert (kept.report.eligible, kept.report.duplicates_found, kept.report.duplicates_dropped) == (4, 2, 0)
    assert len({prompt.prompt_id for prompt in kept.prompts}) == 4
    assert "rows.jsonl:3: row: same prompt and ground truth as line 1" in refusal(path, duplicates="fail")


def test_the_index_is_the_prompt_id_only_when_it_is_safe_and_unique(rows_file: Rows) -> None:
    indices: list[Any] = ["same", "same", 7, "../up", "", None, "prompt-0", "fine"]
    rows = [dapo_row(f"question {n}", extra_info={"index": index}) for n, index in enumerate(indices)]
    prompts = audited(rows_file(rows), per_transaction=len(rows), shuffle=False).prompts
    ids = [prompt.prompt_id for prompt in prompts]
    assert ids[-1] == "fine"
    assert all(prompt_id.startswith("prompt-") and len(prompt_id) == 39 for prompt_id in ids[:-1])
    assert len(set(ids)) == len(ids)


def test_a_digest_id_does_not_depend_on_the_place_of_the_row(rows_file: Rows) -> None:
    first = audited(rows_file([dapo_row("a"), dapo_row("b")]), per_transaction=2).prompts
    second = audited(rows_file([dapo_row("c"), dapo_row("b"), dapo_row("a")]), per_transaction=3).prompts
    assert {prompt.prompt_id for prompt in first} < {prompt.prompt_id for prompt in second}


def test_selection_is_reproducible_and_covers_every_row_once_per_epoch(rows_file: Rows) -> None:
    path = rows_file([dapo_row(f"question {number}") for number in range(6)])
    runs = [[audited(path, transaction=t, per_transaction=2, seed=3) for t in range(1, 7)] for _ in range(2)]
    assert runs[0] == runs[1]
    rows = [prompt.row for audit in runs[0] for prompt in audit.prompts]
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert [(audit.report.position, audit.report.epoch) for audit in runs[0]] == [
        (0, 0),
        (2, 0),
        (4, 0),
        (6, 1),
        (8, 1),
        (10, 1),
    ]


def test_too_few_usable_rows_are_refused(rows_file: Rows) -> None:
    message = refusal(rows_file([dapo_row(), dapo_row()]), per_transaction=2)
    assert message.startswith("1 usable rows, but data.prompts_per_transaction is 2")


def test_a_file_that_changes_between_the_passes_is_refused(rows_file: Rows) -> None:
    path = rows_file([dapo_row("a"), dapo_row("b")])

    def replace_second_row(messages: list[dict[str, str]]) -> list[int]:
        content = path.read_bytes().replace(b'"b"', b'"c"')
        with path.open("r+b", buffering=0) as stream:
            stream.write(content)
        return one_token_per_letter(messages)

    big = rows_file([dapo_row("a"), dapo_row("x" * 20_000), dapo_row("b")])
    assert big == path
    message = refusal(path, tokenize=replace_second_row, token_limit=50_000)
    assert message == "rows.jsonl:3: the file changed while it was read; run the audit again"


def test_the_snapshots_own_tokenizer_and_template_make_the_ids(rows_file: Rows, byte_snapshot: Path) -> None:
    limits = read_model_limits(byte_snapshot)
    assert (limits.positions, limits.vocabulary) == (64, 259)
    tokenize = load_prompt_tokenizer(byte_snapshot)
    path = rows_file([dapo_row("é?")])
    (prompt,) = audited(path, tokenize=tokenize, vocabulary=limits.vocabulary).prompts
    assert prompt.token_ids[0] == 256
    assert prompt.token_ids[-2:] == (257, 258)
    assert len(prompt.token_ids) == 6
    assert "token id 258 is outside" in refusal(path, tokenize=tokenize, vocabulary=258)


def test_a_template_that_refuses_the_messages_is_an_error_of_the_row(rows_file: Rows, byte_snapshot: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "What?"}]
    message = refusal(rows_file([dapo_row(prompt=messages)]), tokenize=load_prompt_tokenizer(byte_snapshot))
    assert message.startswith("rows.jsonl:1: prompt: the chat template refuses these messages: no system messages here")


def test_the_limit_leaves_room_for_a_full_response(byte_snapshot: Path) -> None:
    limits = read_model_limits(byte_snapshot)
    data = DataSpec(path="rows.jsonl")
    assert prompt_token_limit(data, limits, 24) == 40
    assert prompt_token_limit(DataSpec(path="rows.jsonl", max_prompt_tokens=10), limits, 24) == 10
    with pytest.raises(SpecError, match=r"max_prompt_tokens 50 .* exceed the model's 64 positions"):
        prompt_token_limit(DataSpec(path="rows.jsonl", max_prompt_tokens=50), limits, 24)
    assert prompt_token_limit(data, limits, 63) == 1
    with pytest.raises(SpecError, match=r"lower sampling\.max_response_tokens"):
        prompt_token_limit(data, limits, 64)


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"vocab_size": 8}', '{"text_config": 1}'])
def test_a_snapshot_with_a_bad_configuration_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SpecError, match=r"config\.json: "):
        read_model_limits(tmp_path)


def test_a_snapshot_without_tokenizer_or_chat_template_is_refused(tmp_path: Path, byte_snapshot: Path) -> None:
    with pytest.raises(SpecError, match="not a directory"):
        load_prompt_tokenizer(tmp_path / "absent")
    with pytest.raises(SpecError, match="no usable tokenizer"):
        load_prompt_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_snapshot / name).read_bytes())
    with pytest.raises(SpecError, match="no chat template"):
        load_prompt_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(SpecError, match="no usable tokenizer"):
        load_prompt_tokenizer(tmp_path)


def test_rewards_import_and_tokenize_without_torch(byte_snapshot: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import longstraw_core.rewards.audit, longstraw_core.rewards.groups\n"
        "assert 'transformers' not in sys.modules\n"
        "from pathlib import Path\n"
        "from longstraw_core.rewards.prompt_tokens import load_prompt_tokenizer\n"
        "print(load_prompt_tokenizer(Path(sys.argv[1]))([{'role': 'user', 'content': 'a'}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(byte_snapshot)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.startswith("[256, ")

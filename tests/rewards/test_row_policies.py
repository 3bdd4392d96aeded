"""Every kind of problem follows its policy, in JSONL and Parquet alike, and the report says what was done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rewards.audit import Audit, Finding, audit_rows
from longstraw_core.rewards.scoring import truth_check
from longstraw_core.spec import DataRefused
from longstraw_core.spec.transaction import DataSpec, RewardSpec

from .conftest import dapo_row

Write = Callable[[list[dict[str, Any]]], Path]


@pytest.fixture(params=["jsonl", "parquet"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """Write rows as a JSONL or a Parquet file."""

    def jsonl(rows: list[dict[str, Any]]) -> Path:
        import json

        path = tmp_path / "rows.data"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def parquet(rows: list[dict[str, Any]]) -> Path:
        import pyarrow
        from pyarrow import parquet

        path = tmp_path / "rows.data"
        parquet.write_table(pyarrow.Table.from_pylist(rows), str(path), row_group_size=3)
        return path

    return jsonl if request.param == "jsonl" else parquet


def letters(messages: list[dict[str, str]]) -> list[int]:
    return [ord(letter) % 128 for message in messages for letter in message["content"]]


def audited(path: Path, reward: RewardSpec | None = None, transaction: int = 1, **policies: Any) -> Audit:
    return audit_rows(
        path,
        data=DataSpec(path="rows.data", shuffle=False, **policies),
        seed=0,
        transaction=transaction,
        tokenize=letters,
        token_limit=100,
        vocabulary=128,
        check_truth=truth_check(reward or RewardSpec(kind="math_verify")),
        shown_as="rows.data",
    )


def finding(audit: Audit, kind: str) -> Finding:
    return next(finding for finding in audit.report.findings if finding.kind == kind)


def question(number: int, truth: Any = "42", **changes: Any) -> dict[str, Any]:
    return dapo_row(f"question {number}", truth, extra_info={"index": f"id-{number}"}, **changes)


BAD_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("bad_truths", question(1, "")),
    ("bad_truths", question(1, "\\frac{1}{")),
    ("bad_truths", question(1, None)),
    ("too_long_prompts", dapo_row("x" * 101)),
    ("wrong_types", dapo_row(prompt=[{"role": "robot", "content": "x"}])),
    ("wrong_types", question(1, data_source=None)),
    ("control_characters", dapo_row("bell \a")),
]


@pytest.mark.parametrize(("kind", "row"), BAD_ROWS)
def test_a_bad_row_is_refused_or_dropped_and_counted(write: Write, kind: str, row: dict[str, Any]) -> None:
    path = write([question(0), row, question(2)])
    with pytest.raises(DataRefused, match=r"rows\.data(:| row | row: )?.*2: "):
        audited(path)
    dropped = audited(path, prompts_per_transaction=2, **{kind: "drop"})
    assert [prompt.row for prompt in dropped.prompts] == [0, 2]
    assert (dropped.report.rows, dropped.report.eligible) == (3, 2)
    found = finding(dropped, kind)
    assert (found.policy, found.rows, found.dropped, len(found.examples)) == ("drop", 1, 1, 1)
    assert all(other.rows == 0 for other in dropped.report.findings if other.kind != kind)


def test_control_characters_are_kept_when_asked_for(write: Write) -> None:
    kept = audited(write([dapo_row("bell \a")]), control_characters="keep")
    assert kept.prompts[0].token_ids[-1] == 7
    assert (finding(kept, "control_characters").rows, finding(kept, "control_characters").dropped) == (1, 0)


def test_conflicting_truths_follow_the_policy(write: Write) -> None:
    rows = [question(1, "7"), question(2, "8"), question(1, "9"), question(1, "7"), question(3, "5")]
    path = write(rows)
    with pytest.raises(DataRefused, match=r"'9' contradicts the ground truth of the same prompt on (line|row) 1"):
        audited(path)
    dropped = audited(path, conflicting_truths="drop", prompts_per_transaction=2)
    assert [prompt.row for prompt in dropped.prompts] == [1, 4]
    assert dropped.report.conflicting_prompts == 1
    assert finding(dropped, "conflicting_truths").dropped == 2
    kept = audited(path, conflicting_truths="keep", prompts_per_transaction=4)
    assert [(prompt.row, prompt.ground_truth) for prompt in kept.prompts] == [(0, "7"), (1, "8"), (2, "9"), (4, "5")]
    assert len({prompt.prompt_id for prompt in kept.prompts}) == 4


def test_every_fatal_kind_is_named_even_when_another_kind_is_dropped(write: Write) -> None:
    path = write([question(0), question(1, ""), dapo_row("bell \a")])
    with pytest.raises(DataRefused) as caught:
        audited(path, bad_truths="drop")
    assert "control character" in str(caught.value)
    assert "ground_truth" not in str(caught.value)


def test_nothing_left_after_dropping_is_refused(write: Write) -> None:
    with pytest.raises(DataRefused, match="0 usable rows"):
        audited(write([question(1, "")]), bad_truths="drop")


def test_a_public_style_file_of_many_copies_is_read_once_per_prompt(write: Write) -> None:
    rows = [
        question(number % 7, str(number % 7)) | {"extra_info": {"index": f"copy-{number}"}} for number in range(700)
    ]
    report = audited(write(rows)).report
    assert (report.rows, report.unique_prompts, report.eligible, report.duplicates_dropped) == (700, 7, 7, 693)
    assert len(finding(audited(write(rows)), "duplicates").examples) == 20


def test_both_file_formats_give_the_same_prompts(tmp_path: Path, write: Write) -> None:
    rows = [question(number, str(number)) for number in range(20)]
    seen = [audited(write(rows), transaction=t, prompts_per_transaction=3).prompts for t in range(1, 9)]
    order = [prompt.row for prompts in seen for prompt in prompts]
    assert order[:20] == list(range(20))
    assert sorted(order[20:]) == [0, 1, 2, 3]
    assert all(
        prompt.token_ids == tuple(letters([{"content": f"question {prompt.row}"}])) for p in seen for prompt in p
    )


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 100)
    with pytest.raises(DataRefused, match=r"rows\.data: cannot be read as Parquet"):
        audited(path)


def test_a_parquet_file_with_a_broken_column_name_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([question(1)]), str(path))
    path.write_bytes(path.read_bytes().replace(b"ability", b"\xffbility"))
    with pytest.raises(DataRefused, match=r"rows\.data: cannot be read as Parquet"):
        audited(path)


def test_text_that_is_not_utf8_and_times_beyond_python_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    good = pyarrow.Table.from_pylist([question(1)])
    bytes_as_text = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).cast(pyarrow.binary()).view(pyarrow.string())
    nanoseconds = pyarrow.array([1], pyarrow.timestamp("ns"))
    for name, column in (("data_source", bytes_as_text), ("ability", nanoseconds)):
        path = tmp_path / f"{name}.parquet"
        place = good.schema.get_field_index(name)
        parquet.write_table(good.set_column(place, name, column), str(path))
        with pytest.raises(DataRefused, match=r"cannot be read as Parquet|data_source|ability"):
            audited(path)

"""What a person sees while a run goes on."""

import json

import pytest

from longstraw_core.cli.run_display import JsonDisplay, TableDisplay


def finished(stage: str, transaction: int = 1, **fields: object) -> dict[str, object]:
    return {
        "event": "stage_finished",
        "stage": stage,
        "transaction": transaction,
        "status": "ok",
        "seconds": 2.0,
        "peak_memory_bytes": 3 << 20,
        "gradient": "exact",
        "metrics": {},
        **fields,
    }


EVENTS = [
    {"event": "stage_started", "stage": "score_rewards", "transaction": 1},
    finished("score_rewards", metrics={"reward": 0.25, "groups/count": 4, "groups/solved": 3, "groups/skipped": 1}),
    finished("train", status="stepped", metrics={"loss": -0.5, "grad_norm": 1.5, "kl_to_old": 0.0}),
    finished("validate_run"),
]


def test_the_table_shows_the_figures_people_watch(capsys: pytest.CaptureFixture[str]) -> None:
    display = TableDisplay(transactions=1)
    for event in EVENTS:
        display.event(event)
    display.close()
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("1 "))
    for figure in ("+0.250", "3/4", "1/4", "-0.5", "1.5", "exact", "stepped", "3.0 MiB", "6.0s"):
        assert figure in row
    assert "score_rewards" in shown


def test_a_figure_that_does_not_exist_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    display = TableDisplay(transactions=1)
    display.event(finished("validate_run"))
    assert " - " in capsys.readouterr().out


def test_json_is_one_object_per_line_with_the_transaction_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    display = JsonDisplay()
    for event in EVENTS:
        display.event(event)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == len(EVENTS) + 1
    assert records[-1]["event"] == "transaction"
    assert records[-1]["metrics"]["reward"] == 0.25
    assert records[-1]["seconds"] == 6.0

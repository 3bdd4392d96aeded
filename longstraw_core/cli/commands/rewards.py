"""`longstraw rewards`: score a file of responses, or explain one verdict, with the scorers that training uses."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec

import click
from pydantic import ValidationError

from longstraw_core.cli.command import FiniteRange, output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, make_table, print_json
from longstraw_core.rewards.answer_file import AnsweredRow, read_answers
from longstraw_core.rewards.explanation import explain_verdict
from longstraw_core.rewards.scoring import Scorer, open_scorer
from longstraw_core.rewards.verdict import Verdict
from longstraw_core.spec import DataRefused, SpecError
from longstraw_core.spec.transaction import RewardSpec

Parameters = ParamSpec("Parameters")
BATCH_ROWS = 2_000
"""Rows that are held and scored at once."""


def scorer_options(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Add the options that choose a scorer; they carry the names of the fields of `reward`."""
    defaults = RewardSpec()
    for option in (
        click.option("--workers", type=click.IntRange(1, 64), help="Worker processes; the scores do not depend on it."),
        click.option(
            "--timeout-seconds",
            type=FiniteRange(0.0, min_open=True),
            default=defaults.timeout_seconds,
            show_default=True,
            help="Longest time for one comparison or one call of the function.",
        ),
        click.option("--function", "plug_in", metavar="PACKAGE.MODULE:FUNCTION", help="Kind python: your function."),
        click.option(
            "--answer-format",
            type=click.Choice(["any", "label", "box"]),
            default=defaults.answer_format,
            show_default=True,
            help="Kind math_verify: what states the answer.",
        ),
        click.option(
            "--variant",
            type=click.Choice(["label", "strict_box"]),
            default=defaults.variant,
            show_default=True,
            help="Kind dapo_math: the form of the published rule.",
        ),
        click.option(
            "--kind", type=click.Choice(["dapo_math", "math_verify", "python"]), required=True, help="The scorer."
        ),
    ):
        function = option(function)
    return function


@click.group("rewards")
def rewards_group() -> None:
    """Score responses as training would."""


@rewards_group.command("score", epilog="Example: longstraw rewards score --kind math_verify --in answers.jsonl -o json")
@click.option(
    "--in",
    "source",
    type=click.Path(path_type=Path),
    required=True,
    help='JSONL file with one {"id", "response", "ground_truth"} per line.',
)
@scorer_options
@output_option
@reports_errors
def score_command(
    source: Path,
    kind: str,
    variant: str,
    answer_format: str,
    plug_in: str | None,
    timeout_seconds: float,
    workers: int | None,
    output: OutputFormat,
) -> None:
    """Score every response of a file.

    Status: ok (the answer was compared), no_answer (none was stated, or it is not one readable value), timeout (not
    decided within the limits of time and size), bad_row (the ground truth cannot be compared; score is null).
    """
    reward = _reward(kind, variant, answer_format, plug_in, timeout_seconds)
    for _ in read_answers(source):
        pass  # the whole file is checked before anything is scored
    totals: Counter[str] = Counter()
    table: list[tuple[object, ...]] = []
    with open_scorer(reward, workers=workers) as scorer:
        for row, verdict in _scored(read_answers(source), scorer):
            totals[verdict.status] += 1
            totals["correct"] += verdict.correct
            record = _record(row, verdict)
            if output == "json":
                print_json(record)
            else:
                table.append(tuple(_printable(value) for value in record.values()))
        name = scorer.name
    if output == "table":
        screen = console()
        screen.print(make_table(("id", "score", "correct", "status", "extracted", "rule"), table))
        counted = ", ".join(f"{totals[status]} {status}" for status in ("ok", "no_answer", "timeout", "bad_row"))
        screen.print(f"{name}: {totals['correct']} of {len(table)} correct; {counted}", markup=False)


@rewards_group.command(
    "explain",
    epilog='Example: longstraw rewards explain --kind math_verify --ground-truth 0.75 --response "Answer: 3/4"',
)
@click.option("--response", help="The response's text.")
@click.option("--ground-truth", help="The text it is compared with.")
@click.option("--in", "source", type=click.Path(path_type=Path), help="Take the response from this JSONL file instead.")
@click.option("--id", "row_id", help="Which line of the file: its id.")
@scorer_options
@output_option
@reports_errors
def explain_command(
    response: str | None,
    ground_truth: str | None,
    source: Path | None,
    row_id: str | None,
    kind: str,
    variant: str,
    answer_format: str,
    plug_in: str | None,
    timeout_seconds: float,
    workers: int | None,
    output: OutputFormat,
) -> None:
    """Say what was extracted from one response, what it was compared with, and which rule decided."""
    row = _one_row(response, ground_truth, source, row_id)
    reward = _reward(kind, variant, answer_format, plug_in, timeout_seconds)
    with open_scorer(reward, workers=workers) as scorer:
        ((_, verdict),) = _scored([row], scorer)
    steps = {**_record(row, verdict), **explain_verdict(verdict, row.ground_truth, reward)}
    if output == "json":
        print_json(steps)
    else:
        console().print(make_table(("", ""), [(name, _printable(value)) for name, value in steps.items()]))


def _reward(kind: str, variant: str, answer_format: str, plug_in: str | None, timeout_seconds: float) -> RewardSpec:
    try:
        return RewardSpec.model_validate(
            {
                "kind": kind,
                "variant": variant,
                "answer_format": answer_format,
                "function": plug_in,
                "timeout_seconds": timeout_seconds,
            }
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = "--" + "-".join(str(part) for part in problem["loc"]) if problem["loc"] else "--function"
        raise SpecError(f"{where}: {problem['msg'].removeprefix('Value error, ')}") from error


def _scored(rows: Iterable[AnsweredRow], scorer: Scorer) -> Iterator[tuple[AnsweredRow, Verdict]]:
    waiting = iter(rows)
    while batch := list(islice(waiting, BATCH_ROWS)):
        yield from zip(batch, scorer.judge([(row.response, row.ground_truth or "") for row in batch]), strict=True)


def _record(row: AnsweredRow, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": row.row_id,
        "score": None if verdict.status == "bad_row" else verdict.reward,
        "correct": verdict.correct,
        "status": verdict.status,
        "extracted": verdict.extracted,
        "rule": verdict.rule,
    }


def _one_row(response: str | None, ground_truth: str | None, source: Path | None, row_id: str | None) -> AnsweredRow:
    if source is not None:
        if row_id is None or response is not None or ground_truth is not None:
            raise SpecError("--in: give it with --id, and without --response and --ground-truth")
        found = next((row for row in read_answers(source) if str(row.row_id) == row_id), None)
        if found is None:
            raise DataRefused(f"{source}: no line has the id {row_id!r}; --id must be one of the file's")
        return found
    if response is None or ground_truth is None:
        raise SpecError("--response and --ground-truth: give both, or --in with --id")
    return AnsweredRow("response", response, ground_truth)


def _printable(value: object) -> str:
    """Text that cannot move the cursor or break the encoder, whatever the response holds."""
    if value is None:
        return ""
    return "".join(letter if letter.isprintable() else "�" for letter in str(value))

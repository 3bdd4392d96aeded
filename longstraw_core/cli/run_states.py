"""How a run on a cluster looks: its stages' states as lines, a table or JSON; and which exit code its end means."""

import time
from datetime import UTC, datetime

import click

from longstraw_core.cli.output import (
    OutputFormat,
    console,
    human_seconds,
    make_table,
    print_json,
    printable,
)
from longstraw_core.kubeflow.run_state import SUCCEEDED, RunView, TaskView, changed_tasks
from longstraw_core.kubeflow.server import KubeflowServer
from longstraw_core.kubeflow.watch import watch_run
from longstraw_core.spec import Retryable, StageFailed

HEARTBEAT_SECONDS = 60.0


def task_record(task: TaskView) -> dict[str, object]:
    """One stage as a JSON object."""
    return {
        "event": "task",
        "task": task.name,
        "state": task.state,
        "started": task.started.isoformat() if task.started else None,
        "finished": task.finished.isoformat() if task.finished else None,
        "message": task.message,
    }


def run_record(run: RunView, url: str) -> dict[str, object]:
    """The run as a JSON object, without its stages."""
    return {
        "event": "run",
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "created": run.created.isoformat() if run.created else None,
        "finished": run.finished.isoformat() if run.finished else None,
        "message": run.message,
        "url": url,
    }


def show_run(run: RunView, url: str, output: OutputFormat) -> None:
    """Print a run as it is now."""
    if output == "json":
        for task in run.tasks:
            print_json(task_record(task))
        print_json(run_record(run, url))
        return
    now = datetime.now(UTC)
    rows = [(printable(task.name), task.state, _age(task, now), printable(task.message)) for task in run.tasks]
    screen = console()
    screen.print(make_table(("stage", "state", "time", "message"), rows, f"{printable(run.name)}  {run.state}"))
    screen.print(url, markup=False)


def follow_run(
    server: KubeflowServer, run_id: str, output: OutputFormat, *, poll_seconds: float, timeout_seconds: float | None
) -> RunView:
    """Print every change of a stage's state until the run ends; return its last view.

    Raises:
        Retryable: the time is over or the server stays away; the run goes on.
        KeyboardInterrupt: only the following ends; it says how to go on, because submitting again starts a second run.
    """
    last_line = time.monotonic()
    last_away: float | None = None

    def say(line: str) -> None:
        nonlocal last_line
        click.echo(f"{datetime.now(UTC):%H:%M:%S}  {printable(line)}")
        last_line = time.monotonic()

    def show(before: RunView | None, now: RunView) -> None:
        for task in changed_tasks(before, now):
            if output == "json":
                print_json(task_record(task))
            else:
                say(f"{task.name:<36} {task.state:<10} {_age(task, datetime.now(UTC)):>8}  {task.message}".rstrip())
        if before is None or before.state != now.state:
            if output == "json":
                print_json(run_record(now, server.url(run_id)))
            else:
                say(f"run {now.name}: {now.state}")

    def idle() -> None:
        if output == "table" and time.monotonic() - last_line > HEARTBEAT_SECONDS:
            say("no change")

    def away(error: Retryable) -> None:
        nonlocal last_away
        if last_away is None or time.monotonic() - last_away > HEARTBEAT_SECONDS:
            click.echo(f"longstraw: {printable(str(error))}; asking again", err=True)
            last_away = time.monotonic()

    try:
        return watch_run(
            lambda: server.run(run_id),
            show,
            clock=time.monotonic,
            sleep=time.sleep,
            poll_seconds=poll_seconds,
            timeout_seconds=timeout_seconds,
            idle=idle,
            away=away,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; run {run_id} goes on: `longstraw status {run_id} -f` follows it, "
            f"`longstraw cancel {run_id}` ends it"
        ) from None


def require_success(run: RunView, url: str) -> None:
    """Raise StageFailed unless a finished run SUCCEEDED; names the stages that failed."""
    if run.state == SUCCEEDED:
        return
    failed = [task for task in run.tasks if task.state == "FAILED" and not task.name.startswith("transaction ")]
    failed = failed or [task for task in run.tasks if task.state == "FAILED" and "/" in task.name]
    causes = "".join(f"; {task.name}: {task.message or 'failed'}" for task in failed)
    raise StageFailed(
        f"run {run.run_id} is {run.state}{causes or (f'; {run.message}' if run.message else '')}; see {url}"
    )


def _age(task: TaskView, now: datetime) -> str:
    seconds = task.seconds(now)
    return "-" if seconds is None else human_seconds(seconds)

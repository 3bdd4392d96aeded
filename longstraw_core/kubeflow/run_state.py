"""What a run of the pipeline is doing, from KFP's answer: its state and its stages' states. No I/O here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from longstraw_core.spec.errors import SpecError

SUCCEEDED = "SUCCEEDED"
FINAL_STATES = frozenset({SUCCEEDED, "FAILED", "CANCELED", "SKIPPED"})
"""PAUSED, PENDING, RUNNING and CANCELING are not."""

_RUN_ID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""A label's value, because KFP puts the id on the run's pods; it makes UUIDs."""

_PLUMBING = ("root", "executor")
"""Names of tasks that are KFP's own, besides `…-driver`."""


@dataclass(frozen=True)
class TaskView:
    """One stage, or one transaction, of a run."""

    task_id: str
    name: str
    """Of a stage `transaction N/stage` where the run has several transactions."""
    state: str
    started: datetime | None
    finished: datetime | None
    message: str
    """What KFP says of a failure."""

    def seconds(self, now: datetime) -> float | None:
        """How long it has been running, or ran; None before it starts."""
        if self.started is None:
            return None
        return max(((self.finished or now) - self.started).total_seconds(), 0.0)


@dataclass(frozen=True)
class RunView:
    """One run."""

    run_id: str
    name: str
    state: str
    created: datetime | None
    finished: datetime | None
    message: str
    tasks: tuple[TaskView, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the state is final."""
        return self.state in FINAL_STATES


def checked_run_id(text: str) -> str:
    """Return the id of a run.

    Raises:
        SpecError: no run can have it. An empty one, of a variable that is not set, would ask for the list of all runs.
    """
    if _RUN_ID.fullmatch(text) is None:
        raise SpecError(f"RUN {text!r} is no run's id; `longstraw submit` prints it, and the UI has it in the address")
    return text


def run_view(run: Any) -> RunView:
    """Return the view of a `V2beta1Run`."""
    details = getattr(run.run_details, "task_details", None) or []
    return RunView(
        run_id=str(run.run_id or ""),
        name=str(run.display_name or ""),
        state=str(run.state or "PENDING"),
        created=run.created_at,
        finished=_real(run.finished_at),
        message=_message(run.error),
        tasks=tuple(sorted(_tasks(details), key=_order)),
    )


def changed_tasks(before: RunView | None, after: RunView) -> Iterator[TaskView]:
    """Tasks of `after` that are new or in another state than in `before`."""
    known = {} if before is None else {task.task_id: task.state for task in before.tasks}
    for task in after.tasks:
        if known.get(task.task_id) != task.state:
            yield task


def _tasks(details: list[Any]) -> Iterator[TaskView]:
    """Stages and transactions among KFP's tasks; drivers, executors and the root are left out."""
    by_id = {task.task_id: task for task in details}
    parents = {task.task_id: task.parent_task_id for task in details if task.parent_task_id}
    for task in details:
        for child in task.child_tasks or ():
            if child.task_id:
                parents.setdefault(child.task_id, task.task_id)
    for task in details:
        name = str(task.display_name or "")
        if not name or name in _PLUMBING or name.endswith("-driver"):
            continue
        yield TaskView(
            task_id=str(task.task_id),
            name=f"{group}/{name}" if (group := _transaction_of(task.task_id, parents, by_id)) else name,
            state=str(task.state or "PENDING"),
            started=_real(task.start_time),
            finished=_real(task.end_time),
            message=_message(task.error),
        )


def _transaction_of(task_id: str, parents: dict[str, str], by_id: dict[str, Any]) -> str:
    seen: set[str] = set()
    current = parents.get(task_id, "")
    while current and current not in seen:
        seen.add(current)
        name = str(by_id[current].display_name or "") if current in by_id else ""
        if name.startswith("transaction "):
            return name
        current = parents.get(current, "")
    return ""


def _order(task: TaskView) -> tuple[float, str]:
    return (task.started.timestamp() if task.started else float("inf"), task.name)


def _real(moment: datetime | None) -> datetime | None:
    """KFP writes the year 1 or 1970 for 'not yet'."""
    return None if moment is None or moment.year <= 1970 else moment


def _message(error: Any) -> str:
    return " ".join(str(getattr(error, "message", "") or "").split())

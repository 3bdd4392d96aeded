"""Follows a run until it ends, through an API server that may be away for a while."""

from collections.abc import Callable

from longstraw_core.kubeflow.run_state import RunView
from longstraw_core.spec.errors import Retryable

PATIENCE_SECONDS = 600.0
"""How long the server may be away before following is given up; the run itself goes on."""


def watch_run(
    read: Callable[[], RunView],
    show: Callable[[RunView | None, RunView], None],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    poll_seconds: float,
    timeout_seconds: float | None,
    idle: Callable[[], None] = lambda: None,
    away: Callable[[Retryable], None] = lambda error: None,
) -> RunView:
    """Read the run again and again, show every change, and return its last state.

    Args:
        read: Asks the server for the run.
        show: Called with (view before, view now) whenever anything differs, and once at the start.
        clock, sleep: Monotonic seconds, and waiting.
        poll_seconds: Time between two questions.
        timeout_seconds: Longest time to follow; None means until the end.
        idle: Called when nothing changed.
        away: Called with the reason when the server did not answer and is asked again.

    Raises:
        Retryable: the time is over, or the server was away for too long; the run goes on.
    """
    started = last_answer = clock()
    before: RunView | None = None
    while True:
        try:
            now = read()
        except Retryable as error:
            silent = clock() - last_answer
            if silent > PATIENCE_SECONDS:
                raise Retryable(f"{error}; no answer for {silent:.0f} s; the run may still be going on") from error
            away(error)
        else:
            last_answer = clock()
            if now != before:
                show(before, now)
                before = now
            else:
                idle()
            if now.is_finished:
                return now
        if timeout_seconds is not None and clock() - started >= timeout_seconds:
            state = before.state if before is not None else "not known"
            raise Retryable(f"the run is {state} after {timeout_seconds:.0f} s; it goes on, only the waiting ended")
        sleep(poll_seconds)

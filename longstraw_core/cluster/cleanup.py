"""Removes what attempts of a run left behind: the reaper before a stage starts, and `longstraw cleanup`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from longstraw_core.artifacts.receipts import find_receipt
from longstraw_core.artifacts.store import Store
from longstraw_core.cluster.api import ClusterApi
from longstraw_core.cluster.heartbeat import remove_beats
from longstraw_core.cluster.journal import Attempt, attempt_places, read_attempt, read_attempts
from longstraw_core.cluster.ownership import Removal, give_back, remaining, strangers
from longstraw_core.cluster.placement import stage_prefix
from longstraw_core.spec import IntegrityError, SpecError


@dataclass(slots=True)
class CleanupReport:
    """What was deleted, or would be, and what was left alone."""

    removed: list[Removal] = field(default_factory=list[Removal])
    attempts: int = 0
    """Attempts that the journal knows."""
    closed: int = 0
    """Attempts of which nothing was left."""
    running: list[str] = field(default_factory=list[str])
    """Stages whose launcher still lives; left alone."""
    foreign: list[str] = field(default_factory=list[str])
    """Objects that a journal claims and whose labels belong to somebody else; left alone."""
    unreadable: list[str] = field(default_factory=list[str])
    """Why an attempt's journal cannot be read; nothing of that attempt was touched."""


def clean_up(
    store: Store,
    api_of: Callable[[str], ClusterApi],
    run: str,
    *,
    dry_run: bool = False,
    even_running: bool = False,
) -> CleanupReport:
    """Delete everything that a run's journals own and whose launcher is gone; `api_of` gives the API of a namespace.

    Raises:
        SpecError: the store has no journal of this run.
        Retryable: the API server or the store does not answer.
    """
    report = CleanupReport()
    for place in attempt_places(store, run):
        try:
            attempt = read_attempt(store, place)
        except IntegrityError as error:  # the others' objects must not stay because of this one
            report.attempts += 1
            report.unreadable.append(str(error))
            continue
        if attempt is None:
            continue
        report.attempts += 1
        if attempt.closed:
            report.closed += 1
            continue
        api = api_of(attempt.intent.namespace)
        foreign = strangers(api, attempt)
        if foreign:
            report.foreign += foreign
            continue
        if not even_running and launcher_lives(api, attempt):
            report.running.append(f"{attempt.place.stage} of transaction {attempt.place.transaction}")
        elif dry_run:
            report.removed += remaining(api, attempt)
        else:
            report.removed += give_back(api, attempt, reason="cleaned up")
    if not report.attempts:
        raise SpecError(
            f"{store.uri} has no journal of run {run!r}: no multi-pod stage of it was started from this store"
        )
    return report


def launcher_lives(api: ClusterApi, attempt: Attempt) -> bool:
    """Whether the pod that an attempt's launcher ran in is still the same and has not ended."""
    launcher = attempt.intent.launcher
    if launcher is None:
        return False
    pod = api.get("Pod", launcher.name)
    if pod is None or pod["metadata"]["uid"] != launcher.uid or pod["metadata"].get("deletionTimestamp"):
        return False
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def reap(store: Store, api: ClusterApi, current: Attempt, say: Callable[[str], None]) -> list[Removal]:
    """Before a stage starts: delete what earlier attempts of the same run left, except what this one may adopt.

    Earlier attempts of the same stage are dealt with where their objects are adopted or replaced. Another stage's
    attempt is a leftover when the stage has its receipt or its launcher is gone.
    """
    removed: list[Removal] = []
    place = current.place
    for attempt in read_attempts(store, place.run):
        other = attempt.place
        same_stage = (other.transaction, other.stage) == (place.transaction, place.stage)
        if attempt.closed or same_stage or attempt.intent.namespace != api.namespace:
            continue
        finished = find_receipt(store, other.run, other.transaction, other.stage) is not None
        if finished or not launcher_lives(api, attempt):
            foreign = strangers(api, attempt)
            if foreign:
                say(f"{other.prefix} claims {', '.join(foreign)}, which is not this run's: left alone")
                continue
            leftovers = give_back(api, attempt, reason=f"reaped by {place.stage}")
            removed += leftovers
            for item in leftovers:
                say(f"{item.kind} {item.name} of {item.stage} was left behind: deleted")
    return removed


def close_superseded(api: ClusterApi, earlier: list[Attempt]) -> None:
    """Close the earlier attempts of a stage after their objects were adopted or replaced.

    What one of them owns and the current attempt did not take is deleted; the journal then says so.
    """
    for attempt in earlier:
        if not attempt.closed:
            attempt.refresh()
            give_back(api, attempt, reason="superseded")


def forget_heartbeat(store: Store, attempt: Attempt) -> None:
    """Remove the beats of a stage whose pods are gone.

    Raises:
        IntegrityError: the attempt still owns something, whose workers would then end.
    """
    if attempt.live:
        raise IntegrityError(
            f"{attempt.place.prefix} still owns {', '.join(attempt.live.values())}; keep its heartbeat"
        )
    place = attempt.place
    remove_beats(store, f"{stage_prefix(place.run, place.transaction, place.stage)}heartbeat/")

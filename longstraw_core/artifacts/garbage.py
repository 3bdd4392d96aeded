"""Deletes what no kept run, checkpoint or snapshot reaches; finds that out with the walk that verification uses.

What a living stage has stored but no receipt names yet cannot be told from garbage, so nothing young is deleted. Nobody
is locked out meanwhile: what a writer makes reachable while garbage is deleted is noticed between two batches.
"""

import time
from dataclasses import dataclass, field
from typing import get_args

from longstraw_core.artifacts.files import at_once
from longstraw_core.artifacts.finished_work import place_of_finished
from longstraw_core.artifacts.journals import JOURNAL_PREFIX, parse_journal_name
from longstraw_core.artifacts.receipts import RUNS_PREFIX, place_of, receipt_of_envelope
from longstraw_core.artifacts.snapshots import SNAPSHOT_PREFIX
from longstraw_core.artifacts.store import BLOB_PREFIX, POLICY_PREFIX, Store
from longstraw_core.artifacts.verification.walk import StoreWalk
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.receipts import StageName

BATCH_BLOBS = 500
"""Blobs deleted before it is asked again whether a receipt came or a pointer moved."""

_STAGE_ORDER = {stage: number for number, stage in enumerate(get_args(StageName))}


@dataclass(slots=True)
class GarbageReport:
    """What was deleted, or would be."""

    kept_runs: list[str] = field(default_factory=list[str])
    dropped_runs: list[str] = field(default_factory=list[str])
    receipts: list[str] = field(default_factory=list[str])
    """Receipts and signatures of dropped runs, in the order of deletion."""
    blobs: list[str] = field(default_factory=list[str])
    bytes: int = 0
    """Size of these blobs."""
    journals: list[str] = field(default_factory=list[str])
    """Journals, heartbeats and requests of runs that are not kept and none of whose multi-pod stages can own anything
    any more; of runs that were dropped earlier too."""
    young: int = 0
    """Blobs that nothing reaches but that are too young to delete."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What one look at the store says may go."""

    kept_runs: list[str]
    dropped_runs: list[str]
    receipts: dict[str, list[str]]
    """Receipts and signatures of each dropped run, in the order of deletion."""
    blobs: dict[str, int]
    """Name and size of every blob that nothing kept reaches and that is old enough."""
    young: int


def collect_garbage(store: Store, *, keep_runs: int, grace_seconds: float, dry_run: bool = False) -> GarbageReport:
    """Keep the newest runs, every policy's checkpoint, every registered snapshot and all they reach; delete the rest.

    A run whose newest receipt is younger than the grace period is kept beyond the number. The store is looked at twice,
    and only what is garbage both times goes. Dropped runs lose their receipts first, the last stage's first, so that a
    run is visibly gone before any of its blobs is. Blobs go in batches; before each the receipts, pointers and
    snapshots are listed, and when any came or moved since the last look, the store is looked at again. A killed
    collection is continued by the next.

    Raises:
        IntegrityError: something that is kept cannot be read or misses a blob; nothing (more) was deleted.
        Retryable: the storage failed. Before the second look was complete nothing was deleted.
    """
    first = _mark(store, keep_runs, grace_seconds)
    report = GarbageReport(
        kept_runs=first.kept_runs,
        dropped_runs=first.dropped_runs,
        receipts=[name for run in first.dropped_runs for name in first.receipts[run]],
        blobs=sorted(first.blobs),
        bytes=sum(first.blobs.values()),
        journals=_closed_journals(store, set(first.kept_runs), time.time() - grace_seconds),
        young=first.young,
    )
    if dry_run:
        return report
    roots = _roots(store)
    second = _mark(store, keep_runs, grace_seconds)
    report.kept_runs, report.young = second.kept_runs, second.young
    report.dropped_runs = [run for run in first.dropped_runs if run in second.receipts]
    report.receipts = []
    for run in report.dropped_runs:
        report.receipts += [name for name in second.receipts[run] if name in first.receipts[run]]
    for name in report.receipts:
        store.delete_object(name)
        roots.pop(name, None)
    garbage = sorted(first.blobs.keys() & second.blobs.keys())
    report.blobs, report.bytes = [], 0
    while garbage:
        if (now := _roots(store)) != roots:
            roots, third = now, _mark(store, keep_runs, grace_seconds)
            garbage = [name for name in garbage if name in third.blobs]
        batch, garbage = garbage[:BATCH_BLOBS], garbage[BATCH_BLOBS:]
        at_once(store.concurrency, store.delete_object, batch)
        report.blobs += batch
        report.bytes += sum(first.blobs[name] for name in batch)
    kept = {*first.kept_runs, *second.kept_runs}
    report.journals = _closed_journals(store, kept, time.time() - grace_seconds)
    at_once(store.concurrency, store.delete_object, report.journals)
    store.clear_stale_staging()
    return report


def _closed_journals(store: Store, kept_runs: set[str], limit: float) -> list[str]:
    """What launchers kept of all other runs; nothing of a run with an open journal, which `longstraw cleanup` needs."""
    names: dict[str, list[str]] = {}
    attempts: dict[str, dict[tuple[int, str, int], bool]] = {}
    young: set[str] = set()
    for found in store.walk(JOURNAL_PREFIX):
        parsed = parse_journal_name(found.path)
        if parsed is None or parsed.run in kept_runs:
            continue
        names.setdefault(parsed.run, []).append(found.path)
        if found.modified > limit:
            young.add(parsed.run)
        if parsed.attempt is not None:
            place = (parsed.transaction, parsed.stage, parsed.attempt)
            states = attempts.setdefault(parsed.run, {})
            states[place] = states.get(place, False) or parsed.kind == "closed"
    kept = young | {run for run, states in attempts.items() if not all(states.values())}
    return sorted(name for run, found in names.items() if run not in kept for name in found)


def _mark(store: Store, keep_runs: int, grace_seconds: float) -> _Mark:
    limit = time.time() - grace_seconds
    ages: dict[str, float] = {}
    objects: dict[str, list[str]] = {}
    for found in store.walk(RUNS_PREFIX):
        place = place_of(receipt_of_envelope(found.path) or found.path) or place_of_finished(found.path)
        if place is not None:
            objects.setdefault(place.run, []).append(found.path)
            ages[place.run] = max(ages.get(place.run, 0.0), found.modified)
    kept: list[str] = []
    dropped: list[str] = []
    for number, run in enumerate(sorted(ages, key=lambda run: (-ages[run], run))):
        (kept if number < keep_runs or ages[run] > limit else dropped).append(run)
    # before the walk: a blob stored during the walk is not in this list, so it cannot be deleted
    blobs = {found.path: found for found in store.walk(BLOB_PREFIX) if found.kind == "file"}
    reached = _reached(store, kept, set(blobs))
    unreached = {name: found for name, found in blobs.items() if name not in reached}
    old = {name: found.size for name, found in unreached.items() if found.modified <= limit}
    return _Mark(
        kept_runs=kept,
        dropped_runs=dropped,
        receipts={run: sorted(objects[run], key=_deletion_order) for run in dropped},
        blobs=old,
        young=len(unreached) - len(old),
    )


def _roots(store: Store) -> dict[str, bytes | None]:
    """What keeps blobs alive, cheaply: names of receipts and snapshots, and the pointers' bytes."""
    roots: dict[str, bytes | None] = dict.fromkeys((*store.list_names(RUNS_PREFIX), *store.list_names(SNAPSHOT_PREFIX)))
    for name in store.list_names(POLICY_PREFIX):
        pointer = store.read_pointer(name)
        roots[name] = None if pointer is None else pointer.content
    return roots


def _reached(store: Store, runs: list[str], present: set[str]) -> set[str]:
    walk = StoreWalk(store)
    for run in runs:
        walk.receipts.read(run)
    walk.read_roots()
    walk.chain.check_all()
    missing = sorted(walk.reach.blobs.keys() - present)
    missing = [name for name in missing if not store.exists(name)]  # stored while this was running
    faults = [f"{fault.path}: {fault.message}" for fault in walk.report.faults]
    faults += [f"{name}: cannot be read" for name in walk.reader.unread]
    faults += [f"{name}: missing, named by {walk.reach.blobs[name][1]}" for name in missing]
    if faults:
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        raise IntegrityError(
            f"{store.uri}: nothing was deleted because of this: what is to be kept has faults: {faults[0]}{more}; run "
            "longstraw verify"
        )
    return set(walk.reach.blobs)


def _deletion_order(name: str) -> tuple[int, int, bool]:
    """Consumers before producers; a stage's receipt first."""
    place = place_of(receipt_of_envelope(name) or name) or place_of_finished(name)
    if place is None:
        raise AssertionError(f"{name} is neither a receipt, nor a signature, nor a finished part")
    return (-place.transaction, -_STAGE_ORDER[place.stage], place_of(name) is None)

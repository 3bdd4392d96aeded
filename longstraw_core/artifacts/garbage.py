"""Deletes what no kept run, checkpoint or snapshot reaches; finds that out with the walk that verification uses.

What a living stage has stored but no receipt names yet cannot be told from garbage, so nothing young is deleted.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import get_args

from longstraw_core.artifacts.files import FoundFile
from longstraw_core.artifacts.receipts import RUNS_PREFIX, envelope_name, place_of, receipt_of_envelope
from longstraw_core.artifacts.store import BLOB_PREFIX, Store
from longstraw_core.artifacts.verify import StoreWalk
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.receipts import StageName

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
    young: int = 0
    """Blobs that nothing reaches but that are too young to delete."""


def collect_garbage(store: Store, *, keep_runs: int, grace_seconds: float, dry_run: bool = False) -> GarbageReport:
    """Keep the newest runs, every policy's checkpoint, every registered snapshot and all they reach; delete the rest.

    A run whose newest receipt is younger than the grace period is kept beyond the number. Dropped runs lose their
    receipts first, the last stage's first, so that a run is visibly gone before any of its blobs is; a killed
    collection is continued by the next.

    Raises:
        IntegrityError: something that is kept cannot be read or misses a blob; nothing was deleted.
    """
    limit = time.time() - grace_seconds
    ages: dict[str, float] = {}
    objects: dict[str, list[FoundFile]] = {}
    for found in store.walk(RUNS_PREFIX):
        place = place_of(receipt_of_envelope(found.path) or found.path)
        if place is not None:
            objects.setdefault(place.run, []).append(found)
            ages[place.run] = max(ages.get(place.run, 0.0), found.modified)
    newest = sorted(ages, key=lambda run: (-ages[run], run))
    report = GarbageReport()
    for number, run in enumerate(newest):
        (report.kept_runs if number < keep_runs or ages[run] > limit else report.dropped_runs).append(run)
    # before the walk: a blob stored during the walk is not in this list, so it cannot be deleted
    blobs = {found.path: found for found in store.walk(BLOB_PREFIX) if found.kind == "file"}
    reached = _reached(store, report.kept_runs, set(blobs))
    for run in report.dropped_runs:
        report.receipts += sorted((found.path for found in objects[run]), key=_deletion_order)
    for name, found in sorted(blobs.items()):
        if name in reached:
            continue
        if found.modified > limit:
            report.young += 1
            continue
        report.blobs.append(name)
        report.bytes += found.size
    if not dry_run:
        for name in report.receipts:
            store.delete_object(name)
        with ThreadPoolExecutor(store.concurrency) as pool:
            list(pool.map(store.delete_object, report.blobs))
        store.clear_stale_staging()
    return report


def _reached(store: Store, runs: list[str], present: set[str]) -> set[str]:
    walk = StoreWalk(store, {})
    for run in runs:
        walk.read_receipts(run)
    walk.read_roots()
    walk.check_receipts(external=False)
    missing = sorted(walk.reached.keys() - present)
    missing = [name for name in missing if not store.exists(name)]  # stored while this was running
    faults = [f"{fault.path}: {fault.message}" for fault in walk.report.faults]
    faults += [f"{name}: cannot be read" for name in walk.unread]
    faults += [f"{name}: missing, named by {walk.reached[name][1]}" for name in missing]
    if faults:
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        raise IntegrityError(
            f"{store.uri}: nothing was deleted, what is to be kept has faults: {faults[0]}{more}; run longstraw verify"
        )
    return set(walk.reached)


def _deletion_order(name: str) -> tuple[int, int, bool]:
    """Consumers before producers, a receipt before its signature."""
    receipt = receipt_of_envelope(name) or name
    place = place_of(receipt)
    if place is None:
        raise AssertionError(f"{name} is neither a receipt nor a signature")
    return (-place.transaction, -_STAGE_ORDER[place.stage], name == envelope_name(receipt))

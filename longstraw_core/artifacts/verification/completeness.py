"""Which stages a run lacks: removing receipts from its end breaks no chain, so their absence must be said by itself."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import cast, get_args

from longstraw_core.artifacts.faults import MissingStages
from longstraw_core.artifacts.policy import parse_pointer
from longstraw_core.artifacts.receipts import ReceiptPlace
from longstraw_core.artifacts.store import POLICY_PREFIX, Store, check_pointer_name
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.receipts import StageName

MAX_TRANSACTION = 9999
"""Receipts count no further."""


def missing_stages(places: Collection[ReceiptPlace], claimed: Iterable[tuple[str, int]]) -> list[MissingStages]:
    """What each run lacks to be complete: nine receipts, `validate_run`'s the last, in every transaction to its last.

    Args:
        places: the receipts that are there.
        claimed: runs and transactions that something else (a policy's pointer, a checkpoint) says there were. Of a
            run without any receipt nothing is said: its receipts were deleted with it.
    """
    last: dict[str, int] = {}
    for place in places:
        last[place.run] = max(last.get(place.run, 0), place.transaction)
    for run, transaction in claimed:
        if run in last and transaction <= MAX_TRANSACTION:
            last[run] = max(last[run], transaction)
    present = set(places)
    stages = cast(tuple[StageName, ...], get_args(StageName))
    found: list[MissingStages] = []
    for run in sorted(last):
        for transaction in range(1, last[run] + 1):
            missing: list[StageName] = []
            for stage in stages:
                if ReceiptPlace(run, transaction, stage) not in present:
                    missing.append(stage)
            if missing:
                found.append(MissingStages(run, transaction, tuple(missing)))
    return found


def transactions_of_policies(store: Store) -> set[tuple[str, int]]:
    """Run and transaction that each policy's pointer names; a pointer that cannot be one says nothing here."""
    named: set[tuple[str, int]] = set()
    with suppress(IntegrityError):
        for name in store.list_names(POLICY_PREFIX):
            try:
                check_pointer_name(name)
            except SpecError:
                continue
            with suppress(IntegrityError):
                stored = store.read_pointer(name)
                if stored is not None:
                    pointer = parse_pointer(stored.content, name=name)
                    named.add((pointer.run, pointer.transaction))
    return named

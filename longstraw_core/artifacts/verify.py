"""Re-hash a store from its receipts: every blob, chain and manifest; report every fault, not only the first."""

from collections.abc import Mapping

from longstraw_core.artifacts.faults import VerifyReport
from longstraw_core.artifacts.files import Measured
from longstraw_core.artifacts.store import Store
from longstraw_core.artifacts.verification.walk import StoreWalk
from longstraw_core.spec.errors import SpecError


def verify_store(
    store: Store,
    run: str | None = None,
    *,
    external: bool = True,
    deep: bool = False,
    measured: Mapping[str, Measured] | None = None,
) -> VerifyReport:
    """Verify every run of a store, or one, and return a report of everything that is not as published.

    Without `run` the whole store is read, including blobs that no receipt leads to, and whatever does not belong in a
    store is a fault. With `run` only that run's objects and the blobs it reaches are read. Stages that a run lacks are
    listed beside the faults (`VerifyReport.incomplete`).

    Args:
        store: the store to read.
        run: verify this run only.
        external: also re-hash `external:*` inputs that can be reached.
        deep: with `run`, also verify every run whose checkpoints this one was continued from.
        measured: digests that the caller computed from these very files just before, by object name.

    Raises:
        SpecError: the store holds no receipt of `run`, or something may not be read by this user.
        Retryable: the storage fails. No fault is reported then: nothing is known about the rest.
    """
    walk = StoreWalk(store, measured, external=external)
    walk.receipts.read(run)
    if run is not None and not walk.receipts.known:
        if not walk.report.faults:
            raise SpecError(f"{store.uri} holds no receipt of run {run!r}; check the name")
        return walk.finish()
    if run is None:
        walk.hash_everything()
        walk.read_roots()
    walk.chain.check_all()
    while deep and (ancestors := walk.ancestors_to_read()):
        for ancestor in ancestors:
            walk.receipts.read(ancestor)
        walk.chain.check_all()
    walk.hash_reached(whole_store=run is None)
    return walk.finish()

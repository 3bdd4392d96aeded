"""Re-hashes the outputs of one receipt: what a stage does before it reuses or vouches for earlier work."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from longstraw_core.artifacts.files import Measured, UnsafeFile, reporting
from longstraw_core.artifacts.store import Store, blob_name
from longstraw_core.artifacts.trees import read_manifest
from longstraw_core.spec.descriptors import MEDIA_TYPE_TREE, Descriptor
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.receipts import StageReceipt


def check_receipt_outputs(store: Store, receipt: StageReceipt) -> int:
    """Re-hash every output of a receipt, files of trees included; return how many bytes were read.

    Raises:
        IntegrityError: one line per blob that is missing or differs.
    """
    predicate = receipt.predicate
    expected: dict[str, tuple[Measured, str]] = {}
    for output, descriptor in predicate.outputs.items():
        for name, measured, shown in _expected_blobs(store, descriptor, f"{predicate.stage}/{output}"):
            expected[name] = (measured, shown)

    def check(name: str) -> str | None:
        wanted, shown = expected[name]
        with reporting(f"reading {store.uri}/{name}"):
            try:
                observed = store.measure(name)
            except FileNotFoundError:
                return f"{shown}: {name} is missing from {store.uri}"
            except UnsafeFile as error:
                return f"{shown}: {error}"
        if observed != wanted:
            return f"{shown}: {name}: expected {wanted.size} bytes, observed {observed.digest} ({observed.size} bytes)"
        return None

    with ThreadPoolExecutor(store.concurrency) as pool:
        faults = [fault for fault in pool.map(check, sorted(expected)) if fault is not None]
    if faults:
        raise IntegrityError("\n".join(faults))
    return sum(measured.size for measured, _ in expected.values())


def _expected_blobs(store: Store, descriptor: Descriptor, shown: str) -> Iterator[tuple[str, Measured, str]]:
    yield descriptor.uri, Measured(size=descriptor.size, digest=descriptor.digest), shown
    if descriptor.media_type == MEDIA_TYPE_TREE:
        for entry in read_manifest(store, descriptor).entries:
            yield blob_name(entry.digest), Measured(size=entry.size, digest=entry.digest), f"{shown}/{entry.path}"

"""Looks for the outputs of one receipt, or re-hashes them: before a stage vouches for work, or reuses it."""

from collections.abc import Iterator, Mapping, Sequence
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


def missing_outputs(store: Store, outputs: Mapping[str, Descriptor]) -> list[str]:
    """One line per blob that outputs stand for, files of trees included, and that is not stored; hashes nothing.

    Raises:
        IntegrityError: a tree's manifest is corrupt.
    """
    lines: dict[str, str] = {}
    whole = {name: f"output {name!r} ({descriptor.uri})" for name, descriptor in outputs.items()}
    stored = _which_exist(store, [descriptor.uri for descriptor in outputs.values()])
    for name, descriptor in outputs.items():
        if descriptor.uri not in stored:
            lines.setdefault(descriptor.uri, whole[name])
        else:
            for uri, _, shown in _expected_blobs(store, descriptor, whole[name]):
                lines.setdefault(uri, shown if uri == descriptor.uri else f"{shown} ({uri})")
    stored |= _which_exist(store, [uri for uri in lines if uri not in stored])
    return [line for uri, line in lines.items() if uri not in stored]


def _which_exist(store: Store, names: Sequence[str]) -> set[str]:
    with ThreadPoolExecutor(store.concurrency) as pool:
        return {name for name, found in zip(names, pool.map(store.exists, names), strict=True) if found}


def _expected_blobs(store: Store, descriptor: Descriptor, shown: str) -> Iterator[tuple[str, Measured, str]]:
    yield descriptor.uri, Measured(size=descriptor.size, digest=descriptor.digest), shown
    if descriptor.media_type == MEDIA_TYPE_TREE:
        for entry in read_manifest(store, descriptor).entries:
            yield blob_name(entry.digest), Measured(size=entry.size, digest=entry.digest), f"{shown}/{entry.path}"

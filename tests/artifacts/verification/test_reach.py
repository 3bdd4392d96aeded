"""Given receipts, when they are followed, then all they lead to is verified and nothing else is called a fault."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    FileStore,
    verify_store,
    write_receipt,
)
from longstraw_core.artifacts.files import FoundFile
from longstraw_core.spec import canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT
from longstraw_core.spec.errors import SpecError
from tests.artifacts.verification.tampering import named, overwrite


def test_a_long_chain_of_parents_is_walked_to_its_end(store: FileStore, run_directory: Path, make_predicate) -> None:
    shutil.copytree(run_directory / "store" / "blobs", store.root / "blobs")
    value = next(
        manifest
        for manifest in map(json.loads, map(Path.read_bytes, files_starting_with_a_brace(store)))
        if manifest.get("kind") == "longstraw.checkpoint/1" and manifest["parent"] is None
    )
    parent = None
    for transaction in range(1, 601):
        manifest = value | {"run": "older", "transaction": transaction, "lineage": transaction, "parent": parent}
        parent = store.put_blob(canonical_json(manifest), MEDIA_TYPE_CHECKPOINT).to_json_object()
    final = store.put_blob(
        canonical_json(value | {"lineage": 601, "parent": parent, "receipts": {}}), MEDIA_TYPE_CHECKPOINT
    )
    write_receipt(store, make_predicate("manifest_checkpoint", 1, {}, {"checkpoint": final}))
    assert verify_store(store).faults == []
    first = (
        store.root
        / "blobs"
        / "sha256"
        / hashlib.sha256(
            canonical_json(value | {"run": "older", "transaction": 1, "lineage": 1, "parent": None})
        ).hexdigest()
    )
    first.unlink()
    assert named(verify_store(store), first.relative_to(store.root).as_posix()) == ["missing"]


def files_starting_with_a_brace(store: FileStore) -> list[Path]:
    """Blobs that look like JSON objects."""
    return [path for path in (store.root / "blobs" / "sha256").iterdir() if path.read_bytes()[:1] == b"{"]


def test_one_run_is_verified_without_the_other(tmp_path: Path, snapshot: Path, data_file: Path, make_run) -> None:
    make_run(tmp_path, snapshot, data_file, run="one", transactions=1)
    store = make_run(tmp_path, snapshot, data_file, run="two", transactions=1)
    (victim,) = [
        path for path in (store.root / "blobs" / "sha256").iterdir() if path.read_bytes() == b"prompts of two 1\n"
    ]
    overwrite(victim, b"evil")
    assert verify_store(store, "one").ok
    assert not verify_store(store, "two").ok
    assert not verify_store(store).ok
    with pytest.raises(SpecError, match="no receipt of run 'three'"):
        verify_store(store, "three")


def test_a_run_that_continues_another_reaches_every_file_of_its_parent(
    tmp_path: Path, snapshot: Path, data_file: Path, make_run, make_predicate
) -> None:
    store = make_run(tmp_path, snapshot, data_file, run="older", transactions=1)
    name = "runs/older/0001/manifest_checkpoint/receipt.json"
    parent = json.loads((store.root / name).read_bytes())["predicate"]["outputs"]["checkpoint"]
    output = store.put_blob(b"output", "text/plain")
    inputs = {"external:parent_checkpoint": parent}
    write_receipt(store, make_predicate("audit_data", 1, inputs, {"output": output}, run="newer"))
    report = verify_store(store, "newer")
    assert report.ok
    assert report.unchecked == []
    assert (report.receipts, verify_store(store, "newer", deep=True).receipts) == (1, 4)
    weights = hashlib.sha256(b"weights older 1" * 20).hexdigest()
    (store.root / "blobs" / "sha256" / weights).unlink()
    assert named(verify_store(store, "newer"), f"blobs/sha256/{weights}") == ["missing"]


def test_an_unreferenced_intact_blob_is_listed_and_no_fault(tmp_path: Path, snapshot: Path, data_file: Path, make_run):
    store = make_run(tmp_path, snapshot, data_file, transactions=1)
    orphan = store.put_blob(b"left by a killed stage", "application/octet-stream")
    report = verify_store(store)
    assert report.ok
    assert report.unreferenced == [orphan.uri]


def test_a_receipt_that_was_written_after_its_directory_was_listed_breaks_no_chain(run_directory: Path) -> None:
    """A listing is not one moment: of a run that goes on it may show a consumer and not its producer."""
    late = "runs/demo/0002/train/receipt.json"

    class Listing(FileStore):
        def walk(self, prefix: str = "") -> Iterator[FoundFile]:
            yield from (found for found in super().walk(prefix) if found.path != late)

    report = verify_store(Listing(run_directory / "store"))
    assert (report.faults, report.receipts) == ([], 6)
    (run_directory / "store" / late).unlink()
    assert named(verify_store(Listing(run_directory / "store")), "runs/demo/0002/manifest_checkpoint/receipt.json")


def test_what_a_writer_has_in_staging_is_listed_and_no_fault(run_directory: Path) -> None:
    """Whoever verifies a store while others write into it must not be told of tampering."""
    (run_directory / "store" / "staging" / "unfinished").write_bytes(b"half")
    report = verify_store(FileStore(run_directory / "store"))
    assert report.faults == []
    assert "staging/unfinished" in report.unreferenced

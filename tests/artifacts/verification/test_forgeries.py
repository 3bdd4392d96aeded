"""Given forged receipts, checkpoints and pointers, when a store is verified, then what they name contradicts them."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    FileStore,
    register_snapshot,
    verify_directory,
    verify_store,
)
from longstraw_core.spec import canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT, MEDIA_TYPE_TREE
from tests.artifacts.verification.tampering import OTHER, named, overwrite


def test_an_older_receipt_replayed_at_a_later_place_is_named(run_directory: Path, receipt_path) -> None:
    older = receipt_path(run_directory, 1, "train").read_bytes()
    overwrite(receipt_path(run_directory, 2, "train"), older)
    report = verify_store(FileStore(run_directory / "store"))
    assert named(report, "runs/demo/0002/train/receipt.json") == ["misplaced"]
    assert "chain" in named(report, "runs/demo/0002/manifest_checkpoint/receipt.json")


def test_a_receipt_of_another_attempt_breaks_the_chain(run_directory: Path, receipt_path) -> None:
    path = receipt_path(run_directory, 1, "train")
    value = json.loads(path.read_bytes())
    value["predicate"]["ranks"][0]["phases"][0]["seconds"] = 99.5
    overwrite(path, canonical_json(value))
    report = verify_store(FileStore(run_directory / "store"))
    assert "chain" in named(report, "runs/demo/0001/manifest_checkpoint/receipt.json")
    assert any("receipt of train is not the one" in fault.message for fault in report.faults)


def test_an_output_exchanged_for_another_stored_blob_breaks_the_chain(run_directory: Path, receipt_path) -> None:
    path = receipt_path(run_directory, 1, "audit_data")
    value = json.loads(path.read_bytes())
    other = json.loads(receipt_path(run_directory, 2, "audit_data").read_bytes())
    value["predicate"]["outputs"] = other["predicate"]["outputs"]
    value["subject"] = other["subject"]
    overwrite(path, canonical_json(value))
    report = verify_store(FileStore(run_directory / "store"))
    messages = [fault.message for fault in report.faults if fault.path == "runs/demo/0001/train/receipt.json"]
    assert any("is not the receipt that was read" in message for message in messages)
    assert any("not what runs/demo/0001/audit_data/receipt.json says it wrote" in message for message in messages)


def test_a_consistently_forged_store_is_still_caught_by_the_index(run_directory: Path, receipt_path) -> None:
    path = receipt_path(run_directory, 2, "manifest_checkpoint")
    value = json.loads(path.read_bytes())
    value["predicate"]["metrics"]["reward"] = 1
    overwrite(path, canonical_json(value))
    assert verify_store(FileStore(run_directory / "store")).ok  # nothing in the store reads the last receipt
    assert named(verify_directory(run_directory), path.relative_to(run_directory).as_posix()) == ["changed"]


def test_a_non_canonical_receipt_is_refused(run_directory: Path, receipt_path) -> None:
    path = receipt_path(run_directory, 2, "manifest_checkpoint")
    overwrite(path, json.dumps(json.loads(path.read_bytes()), indent=1).encode())
    report = verify_store(FileStore(run_directory / "store"))
    assert named(report, "runs/demo/0002/manifest_checkpoint/receipt.json") == ["malformed"]


def without(key: str) -> Callable[[dict], None]:
    return lambda predicate: predicate["inputs"].pop(key)


@pytest.mark.parametrize(
    ("stage", "transaction", "forge", "message"),
    [
        ("train", 2, without("receipt:audit_data"), "input 'receipt:audit_data' is missing"),
        ("train", 2, without("previous:receipt:manifest_checkpoint"), "input 'previous:receipt:manifest_checkpoint'"),
        (
            "train",
            1,
            lambda predicate: predicate["inputs"].update({"previous:receipt:train": blob(7)}),
            "there is no transaction before",
        ),
        (
            "train",
            1,
            lambda predicate: predicate["inputs"].update({"receipt:sample": blob(7)}),
            "receipt runs/demo/0001/sample/receipt.json is missing",
        ),
        (
            "train",
            1,
            lambda predicate: predicate["inputs"]["receipt:audit_data"].update(uri="runs/x"),
            "is not the receipt that was read",
        ),
        (
            "manifest_checkpoint",  # nobody names the last receipt, so only its own input can be at fault
            2,
            lambda predicate: predicate["inputs"]["receipt:train"].update(size=1),
            "is not the receipt that was read",
        ),
        (
            "manifest_checkpoint",  # nobody names the last receipt, so only its own input can be at fault
            2,
            lambda predicate: predicate["inputs"]["receipt:train"].update(media_type="text/plain"),
            "is not the receipt that was read",
        ),
        (
            "manifest_checkpoint",
            2,
            lambda predicate: predicate["outputs"]["checkpoint"].update(size=1),
            "gives a wrong size for blobs/",
        ),
        (
            "manifest_checkpoint",
            2,
            lambda predicate: predicate["outputs"]["checkpoint"].update(uri="elsewhere"),
            "an output is a blob of this store",
        ),
        (
            "manifest_checkpoint",
            2,
            lambda predicate: predicate["outputs"]["checkpoint"].update(media_type=MEDIA_TYPE_TREE),
            "is not a tree manifest",
        ),
        ("manifest_checkpoint", 2, lambda predicate: predicate.update(spec_digest=OTHER), "spec_digest differs"),
        ("manifest_checkpoint", 2, lambda predicate: predicate.update(gradient="stopgrad"), "gradient differs"),
    ],
)
def test_a_forged_receipt_is_contradicted_by_what_it_names(
    run_directory: Path, receipt_path, stage: str, transaction: int, forge: Callable[[dict], None], message: str
) -> None:
    path = receipt_path(run_directory, transaction, stage)
    value = json.loads(path.read_bytes())
    forge(value["predicate"])
    overwrite(path, canonical_json(value))
    report = verify_store(FileStore(run_directory / "store"))
    assert any(message in fault.message for fault in report.faults), report.faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "other"}, "run differs"),
        ({"transaction": 3}, "transaction differs"),
        ({"transaction": 3}, "parent is of transaction 1, not 2"),
        ({"lineage": 3}, "lineage does not follow"),
        ({"parent": None}, "must name the checkpoint before"),
        ({"parent": None}, "lineage does not follow"),
        ({"receipts": {"train": OTHER}}, "receipt of train is not the one"),
        ({"receipts": {"sample": OTHER}}, "receipt of sample is not the one"),
        ({"files": []}, "differs between the checkpoint manifest and its tree"),
        (
            {"model_snapshot": {"uri": "x", "digest": OTHER, "size": 3, "media_type": MEDIA_TYPE_TREE}},
            "blob is missing",
        ),
        (
            {"parent": {"uri": "x", "digest": OTHER, "size": 3, "media_type": MEDIA_TYPE_TREE}},
            "parent is no checkpoint",
        ),
        ({"extra": 1}, "is not a checkpoint manifest"),
    ],
    ids=str,
)
def test_a_forged_checkpoint_manifest_is_contradicted(
    run_directory: Path, receipt_path, change: dict, message: str
) -> None:
    report = forge_checkpoint(run_directory, receipt_path, lambda manifest: manifest | change)
    assert any(message in fault.message for fault in report.faults), report.faults


def test_a_checkpoint_with_another_parent_than_the_transaction_before_is_named(run_directory, receipt_path) -> None:
    store = FileStore(run_directory / "store")

    def another_parent(manifest: dict) -> dict:
        parent = json.loads((store.root / manifest["parent"]["uri"]).read_bytes())
        forged = store.put_blob(canonical_json(parent | {"optimizer_steps": 9}), MEDIA_TYPE_CHECKPOINT)
        return manifest | {"parent": forged.to_json_object()}

    (fault,) = forge_checkpoint(run_directory, receipt_path, another_parent).faults
    assert "parent is not what runs/demo/0001/manifest_checkpoint/receipt.json says it wrote" in fault.message


def test_two_descriptors_of_one_blob_with_different_sizes_are_named(run_directory: Path, receipt_path) -> None:
    report = forge_checkpoint(
        run_directory,
        receipt_path,
        lambda manifest: manifest | {"model_snapshot": manifest["model_snapshot"] | {"size": 1}},
    )
    assert any("give different sizes" in fault.message for fault in report.faults)


def blob(seed: int) -> dict:
    """The descriptor of a blob that is nowhere."""
    digest = hashlib.sha256(bytes([seed])).hexdigest()
    return {"uri": f"blobs/sha256/{digest}", "digest": f"sha256:{digest}", "size": 1, "media_type": "text/plain"}


def forge_checkpoint(run_directory: Path, receipt_path, forge: Callable[[dict], dict]):
    """Replace the last checkpoint manifest consistently, receipt included, and verify the store."""
    store = FileStore(run_directory / "store")
    path = receipt_path(run_directory, 2, "manifest_checkpoint")
    receipt = json.loads(path.read_bytes())
    old = receipt["predicate"]["outputs"]["checkpoint"]
    manifest = json.loads((store.root / old["uri"]).read_bytes())
    forged = store.put_blob(canonical_json(forge(manifest)), old["media_type"])
    receipt["predicate"]["outputs"]["checkpoint"] = forged.to_json_object()
    receipt["subject"][0]["digest"]["sha256"] = forged.hex
    overwrite(path, canonical_json(receipt))
    return verify_store(store)


def test_hostile_external_uris_and_names_are_faults_and_no_crash(run_directory: Path, receipt_path) -> None:
    path = receipt_path(run_directory, 1, "audit_data")
    value = json.loads(path.read_bytes())
    value["predicate"]["inputs"]["external:data"]["uri"] = "file:///a%00b"
    value["predicate"]["inputs"]["external:model_snapshot"]["uri"] = "s3://elsewhere/snapshot/"
    value["predicate"]["inputs"]["unknown key"] = value["predicate"]["inputs"]["external:data"]
    overwrite(path, canonical_json(value))
    with open(os.fsencode(run_directory / "store" / "runs") + b"/\xff", "wb") as file:
        file.write(b"x")
    report = verify_store(FileStore(run_directory / "store"))
    assert named(report, "file:///a%00b") == ["malformed"]
    assert "malformed" in named(report, "runs/demo/0001/audit_data/receipt.json")
    assert named(report, "runs/\\udcff") == ["extra"]
    assert any("s3://elsewhere/snapshot/" in line for line in report.unchecked)
    json.dumps([fault.message for fault in report.faults]).encode()


def test_a_pointer_that_is_none_is_reported_with_the_digest_of_its_bytes(run_directory: Path) -> None:
    store = FileStore(run_directory / "store")
    for name in ("policies/main/current.json", "policies/main/other.json", f"snapshots/{'0' * 64}.json"):
        path = store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"no":1}')
        (fault,) = [fault for fault in verify_store(store).faults if fault.path == name]
        assert (fault.kind, fault.observed) == ("malformed", "sha256:" + hashlib.sha256(b'{"no":1}').hexdigest())


def test_a_registered_snapshot_whose_descriptor_was_edited_is_named(run_directory: Path, snapshot: Path) -> None:
    store = FileStore(run_directory / "store")
    digest = register_snapshot(store, snapshot).digest.removeprefix("sha256:")
    assert verify_store(store).faults == []
    path = store.root / f"snapshots/{digest}.json"
    intact = json.loads(path.read_bytes())
    for change in ({"uri": "elsewhere"}, {"size": 1}, {"media_type": "text/plain"}, {"digest": OTHER}):
        overwrite(path, canonical_json(intact | change))
        assert f"snapshots/{digest}.json" in {fault.path for fault in verify_store(store).faults}, change

"""Given a finished run and an attacker with write access, when it is verified, then every change is named."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longstraw_core.artifacts import (
    FileStore,
    ReceiptPlace,
    register_snapshot,
    seal_directory,
    split_receipt_uri,
    unseal_directory,
    verify_directory,
    verify_store,
    write_receipt,
)
from longstraw_core.artifacts.files import FoundFile
from longstraw_core.spec import canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT, MEDIA_TYPE_TREE
from longstraw_core.spec.errors import IntegrityError, SpecError


def files_of(directory: Path) -> list[str]:
    """Relative paths of all regular files but the lock."""
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    )


def blobs_of(directory: Path) -> list[str]:
    return [name for name in files_of(directory) if name.startswith("store/blobs/")]


def overwrite(path: Path, content: bytes) -> None:
    """Change a file the way an attacker would, whatever its mode."""
    path.unlink()
    path.write_bytes(content)


def named(report, path: str) -> list[str]:
    """Kinds of the faults reported for a path."""
    return [fault.kind for fault in report.faults if fault.path == path]


def test_an_untouched_run_verifies_wherever_it_is_moved(run_directory: Path) -> None:
    report = verify_directory(run_directory)
    assert report.faults == []
    assert report.ok
    assert report.receipts == 6
    assert report.unchecked == []
    assert report.blobs == len(blobs_of(run_directory))
    listed = [name for name in files_of(run_directory) if not name.startswith("complete.")]
    assert report.bytes == sum((run_directory / name).stat().st_size for name in listed)


def test_index_agrees_with_hashlib_as_an_independent_oracle(run_directory: Path) -> None:
    (index,) = run_directory.glob("complete.sha256-*.json")
    content = index.read_bytes()
    assert index.name == f"complete.sha256-{hashlib.sha256(content).hexdigest()}.json"
    assert {entry["path"]: (entry["digest"], entry["size"]) for entry in json.loads(content)["entries"]} == {
        name: (
            "sha256:" + hashlib.sha256((run_directory / name).read_bytes()).hexdigest(),
            (run_directory / name).stat().st_size,
        )
        for name in files_of(run_directory)
        if name != index.name
    }


def test_blob_names_are_the_hashlib_digest_of_their_bytes(run_directory: Path) -> None:
    for name in blobs_of(run_directory):
        assert Path(name).name == hashlib.sha256((run_directory / name).read_bytes()).hexdigest()


def test_one_flipped_byte_in_any_file_is_named(run_directory: Path) -> None:
    for name in files_of(run_directory):
        path = run_directory / name
        original = path.read_bytes()
        if not original:
            continue
        position = len(original) // 2
        overwrite(path, original[:position] + bytes([original[position] ^ 1]) + original[position + 1 :])
        report = verify_directory(run_directory)
        assert "changed" in named(report, name), name
        overwrite(path, original)
    assert verify_directory(run_directory).ok


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_any_byte_of_any_file_set_to_any_other_value_is_found(run_directory: Path, choice: st.DataObject) -> None:
    name = choice.draw(st.sampled_from([n for n in files_of(run_directory) if (run_directory / n).stat().st_size]))
    original = (run_directory / name).read_bytes()
    position = choice.draw(st.integers(0, len(original) - 1))
    flip = choice.draw(st.integers(1, 255))
    overwrite(run_directory / name, original[:position] + bytes([original[position] ^ flip]) + original[position + 1 :])
    try:
        assert named(verify_directory(run_directory), name)
    finally:
        overwrite(run_directory / name, original)


def test_without_the_index_the_store_alone_still_names_every_flipped_blob_and_receipt(run_directory: Path) -> None:
    store = FileStore(run_directory / "store")
    for name in files_of(run_directory / "store"):
        path = run_directory / "store" / name
        original = path.read_bytes()
        if not original:
            continue
        overwrite(path, original[:-1] + bytes([original[-1] ^ 4]))
        assert named(verify_store(store), name), name
        overwrite(path, original)


def test_any_truncated_file_is_named(run_directory: Path) -> None:
    for name in files_of(run_directory):
        path = run_directory / name
        original = path.read_bytes()
        if not original:
            continue
        overwrite(path, original[:-1])
        assert "changed" in named(verify_directory(run_directory), name), name
        overwrite(path, original)


def test_any_removed_file_is_named(run_directory: Path) -> None:
    for name in files_of(run_directory):
        path = run_directory / name
        original = path.read_bytes()
        path.unlink()
        report = verify_directory(run_directory)
        if name.startswith("complete."):
            assert [fault.kind for fault in report.faults] == ["incomplete"]
        else:
            assert "missing" in named(report, name), name
        path.write_bytes(original)


def test_any_file_replaced_by_a_symlink_to_the_same_bytes_is_named(run_directory: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files_of(run_directory)):
        path = run_directory / name
        elsewhere = tmp_path / f"elsewhere-{number}"
        os.rename(path, elsewhere)
        path.symlink_to(elsewhere)
        assert "symlink" in named(verify_directory(run_directory), name), name
        path.unlink()
        os.rename(elsewhere, path)


@pytest.mark.parametrize("directory", ["store", "store/blobs", "store/blobs/sha256", "store/runs/demo/0001", "logs"])
def test_a_directory_replaced_by_a_symlink_to_the_same_files_is_named(run_directory: Path, directory: str) -> None:
    os.rename(run_directory / directory, run_directory.parent / "elsewhere")
    (run_directory / directory).symlink_to(run_directory.parent / "elsewhere")
    report = verify_directory(run_directory)
    assert "symlink" in named(report, directory)
    if directory != "logs":
        assert len(report.faults) > 1


@pytest.mark.parametrize(
    "name",
    [
        "extra.txt",
        "logs/.hidden",
        "store/extra",
        "store/blobs/sha256/not-a-digest",
        "store/blobs/md5/" + "0" * 64,
        "store/runs/demo/0001/train/receipt.json.bak",
        "store/runs/demo/0001/unknown_stage/receipt.json",
        "store/runs/demo/0000/train/receipt.json",
        "store/runs/extra",
        "store/.lock",
    ],
)
def test_an_added_file_is_named(run_directory: Path, name: str) -> None:
    (run_directory / name).parent.mkdir(parents=True, exist_ok=True)
    (run_directory / name).write_text("added")
    report = verify_directory(run_directory)
    assert "extra" in named(report, name)
    if name.startswith("store/"):
        assert named(verify_store(FileStore(run_directory / "store")), name.removeprefix("store/")) == ["extra"]


def test_a_fifo_a_leftover_and_a_non_utf8_name_are_named_in_one_report(run_directory: Path) -> None:
    os.mkfifo(run_directory / "store" / "pipe")
    (run_directory / "store" / "staging" / "abc").write_bytes(b"half")
    with open(os.fsencode(run_directory / "logs") + b"/\xff", "wb") as file:
        file.write(b"x")
    report = verify_directory(run_directory)
    assert "special" in named(report, "store/pipe")
    assert named(report, "store/staging/abc") == ["extra"]
    assert named(report, "logs/\\udcff") == ["extra"]


def test_two_swapped_blobs_are_both_named(run_directory: Path) -> None:
    first, second = [name for name in blobs_of(run_directory) if (run_directory / name).stat().st_size][:2]
    one, two = (run_directory / first).read_bytes(), (run_directory / second).read_bytes()
    overwrite(run_directory / first, two)
    overwrite(run_directory / second, one)
    unseal_directory(run_directory)
    report = verify_directory(run_directory)
    assert "changed" in named(report, first)
    assert "changed" in named(report, second)


def test_every_fault_is_reported_with_expected_and_observed(run_directory: Path) -> None:
    victims = [name for name in blobs_of(run_directory) if (run_directory / name).stat().st_size]
    for name in victims:
        overwrite(run_directory / name, b"evil")
    report = verify_store(FileStore(run_directory / "store"), external=False)
    evil = hashlib.sha256(b"evil").hexdigest()
    changed = [fault for fault in report.faults if fault.kind == "changed"]
    assert sorted("store/" + fault.path for fault in changed) == victims
    for fault in changed:
        assert Path(fault.path).name in fault.expected
        assert evil in fault.observed
    with pytest.raises(IntegrityError, match="more faults"):
        report.raise_if_faulty("store")


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


OTHER = "sha256:" + "0" * 64


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


def test_changed_snapshot_and_data_are_named_and_unreachable_ones_only_listed(
    tmp_path: Path, snapshot: Path, data_file: Path, make_run
) -> None:
    own_snapshot = Path(shutil.copytree(snapshot, tmp_path / "snapshot"))
    own_data = Path(shutil.copy(data_file, tmp_path / "rows.jsonl"))
    (tmp_path / "run").mkdir()
    store = make_run(tmp_path / "run", own_snapshot, own_data)
    assert verify_store(store).ok
    (own_snapshot / "config.json").write_text("[]")
    (own_snapshot / "added.bin").write_text("")
    own_data.write_text("other\n")
    faults = {(fault.kind, fault.path) for fault in verify_store(store).faults}
    assert faults == {
        ("changed", f"{own_snapshot}/config.json"),
        ("extra", f"{own_snapshot}/added.bin"),
        ("changed", str(own_data)),
    }
    assert verify_store(store, external=False).ok
    seal_directory(tmp_path / "run")
    assert {(fault.kind, fault.path) for fault in verify_directory(tmp_path / "run").faults} == faults
    shutil.rmtree(own_snapshot)
    own_data.unlink()
    report = verify_store(store)
    assert report.ok
    assert {line.rpartition(": ")[2] for line in report.unchecked} == {own_snapshot.as_uri() + "/", own_data.as_uri()}


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


def test_sealing_again_replaces_the_index_and_an_unsealed_run_is_incomplete(run_directory: Path) -> None:
    (old,) = run_directory.glob("complete.sha256-*.json")
    (run_directory / "more.txt").write_text("more")
    assert not verify_directory(run_directory).ok
    new = seal_directory(run_directory)
    assert new != old
    assert list(run_directory.glob("complete.*")) == [new]
    assert verify_directory(run_directory).ok
    assert seal_directory(run_directory) == new
    unseal_directory(run_directory)
    report = verify_directory(run_directory)
    assert [fault.kind for fault in report.faults] == ["incomplete"]
    assert "run is incomplete" in report.faults[0].message


def test_two_indexes_or_an_index_under_a_wrong_name_are_refused(run_directory: Path) -> None:
    (index,) = run_directory.glob("complete.sha256-*.json")
    second = run_directory / f"complete.sha256-{'0' * 64}.json"
    shutil.copy(index, second)
    assert [fault.kind for fault in verify_directory(run_directory).faults] == ["incomplete"]
    index.unlink()
    assert named(verify_directory(run_directory), second.name) == ["changed"]


def test_sealing_clears_what_killed_writers_left_and_leaves_the_lock_out(run_directory: Path) -> None:
    (run_directory / "store" / "staging" / "abandoned").write_bytes(b"half")
    (run_directory / ".longstraw-partial-abandoned").write_bytes(b"half")
    (run_directory / "logs" / ".longstraw-partial-tree" / "sub").mkdir(parents=True)
    (run_directory / "logs" / ".longstraw-partial-tree" / "sub" / "file").write_bytes(b"half")
    seal_directory(run_directory)
    (run_directory / ".lock").touch()
    assert os.listdir(run_directory / "logs") == ["train.log"]
    assert verify_directory(run_directory).ok


def test_sealing_refuses_a_symlink_by_name(run_directory: Path) -> None:
    (run_directory / "logs" / "link").symlink_to("train.log")
    with pytest.raises(SpecError, match="logs/link is a symlink"):
        seal_directory(run_directory)


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


def test_what_a_writer_has_in_staging_is_listed_and_no_fault(run_directory: Path) -> None:
    """Whoever verifies a store while others write into it must not be told of tampering."""
    (run_directory / "store" / "staging" / "unfinished").write_bytes(b"half")
    report = verify_store(FileStore(run_directory / "store"))
    assert report.faults == []
    assert "staging/unfinished" in report.unreferenced


@pytest.mark.parametrize("root", ["s3://bucket", "s3://bucket/runs", "s3://bucket/a/runs/b", "file:///runs/runs"])
@pytest.mark.parametrize("run", ["nightly", "runs", "0001"])
def test_the_uri_of_a_receipt_is_split_whatever_prefix_and_run_are_called(root: str, run: str) -> None:
    place = ReceiptPlace(run, 2, "train")
    assert split_receipt_uri(f"{root}/{place.name}") == (root, place)
    for other in (root, f"{root}/runs/{run}", f"{root}/runs/{run}/0000/train/receipt.json"):
        assert split_receipt_uri(other) == (other, None)


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        verify_directory(tmp_path / "nothing")

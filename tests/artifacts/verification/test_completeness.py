"""Given runs that lack receipts, when they are verified, then what is missing is said, however the rest looks."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner, Result

from longstraw_core.artifacts import (
    FileStore,
    ReceiptPlace,
    publish_manifest,
    seal_directory,
    verify_store,
    write_receipt,
)
from longstraw_core.artifacts.faults import MissingStages
from longstraw_core.artifacts.verification.completeness import missing_stages
from longstraw_core.cli.main import main
from longstraw_core.spec import CheckpointManifest, Descriptor, canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT, TreeManifest
from longstraw_core.spec.policy import PolicyPointer
from longstraw_core.spec.receipts import StageName
from tests.artifacts.conftest import SPEC_DIGEST

STAGES = get_args(StageName)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def complete(tmp_path: Path, make_predicate) -> FileStore:
    """A store with one run of two transactions, every stage of them."""
    store = FileStore(tmp_path / "work" / "store", create=True)
    for transaction in (1, 2):
        for stage in STAGES:
            output = store.put_blob(f"{stage} {transaction}".encode(), "text/plain")
            write_receipt(store, make_predicate(stage, transaction, {}, {"output": output}))
    return store


def publish_checkpoint(store: FileStore, run: str, transaction: int, parent: Descriptor | None) -> Descriptor:
    """A checkpoint without files, whose lineage is its transaction."""
    manifest = CheckpointManifest(
        run=run,
        transaction=transaction,
        lineage=transaction,
        data_position=transaction,
        stepped=True,
        optimizer_steps=transaction,
        tree=publish_manifest(store, TreeManifest(entries=())),
        files=(),
        parent=parent,
        model_snapshot=store.put_blob(b"model", "text/plain"),
        spec_digest=SPEC_DIGEST,
        gradient="exact",
        receipts={},
    )
    return store.put_blob(canonical_json(manifest), MEDIA_TYPE_CHECKPOINT)


def places(*counts: int, run: str = "demo") -> list[ReceiptPlace]:
    """The first so many stages of transactions 1, 2, …"""
    return [
        ReceiptPlace(run, transaction, stage)
        for transaction, count in enumerate(counts, start=1)
        for stage in STAGES[:count]
    ]


def test_a_run_is_complete_when_every_transaction_has_every_stage() -> None:
    assert missing_stages(places(9, 9), []) == []
    assert missing_stages([], []) == []


def test_what_is_missing_is_said_by_run_and_transaction() -> None:
    assert missing_stages([*places(9, 7), *places(0, 9, run="later")], []) == [
        MissingStages("demo", 2, ("manifest_checkpoint", "validate_run")),
        MissingStages("later", 1, STAGES),
    ]


def test_a_transaction_that_only_a_pointer_or_checkpoint_knows_of_is_missing_and_a_deleted_run_is_not() -> None:
    claimed = [("demo", 3), ("demo", 1), ("deleted", 5), ("demo", 10**15)]
    assert missing_stages(places(9, 9), claimed) == [MissingStages("demo", 3, STAGES)]


@pytest.mark.parametrize("removed", range(1, 10))
def test_removing_the_newest_receipts_breaks_no_chain_but_is_seen_from_the_stores_uri(
    complete: FileStore, removed: int
) -> None:
    assert invoke("verify", complete.uri).exit_code == 0
    for stage in STAGES[-removed:]:
        (complete.root / ReceiptPlace("demo", 2, stage).name).unlink()
    if removed == 9:  # a whole transaction: only what refers to it can tell
        checkpoint = publish_checkpoint(complete, "demo", 2, publish_checkpoint(complete, "older", 1, None))
        pointer = PolicyPointer(policy="main", checkpoint=checkpoint, lineage=2, run="demo", transaction=2)
        assert complete.replace_pointer("policies/main/current.json", canonical_json(pointer), None)
    report = verify_store(complete, "demo")
    assert report.faults == []
    assert not report.complete
    assert report.incomplete == [MissingStages("demo", 2, STAGES[-removed:])]
    for target in ([complete.uri], [f"{complete.uri}/{ReceiptPlace('demo', 1, 'train').name}"]):
        result = invoke("verify", *target, "-o", "json")
        assert result.exit_code == 13, result.output
        verdict = json.loads(result.stdout.splitlines()[0])
        assert (verdict["ok"], verdict["complete"]) == (True, False)
        assert verdict["incomplete"] == [{"run": "demo", "transaction": 2, "missing": list(STAGES[-removed:])}]
        assert invoke("verify", *target, "--allow-incomplete").exit_code == 0
    table = invoke("verify", complete.uri).output
    assert f"incomplete run demo, transaction 2: {', '.join(STAGES[-removed:])}" in table
    assert "INCOMPLETE" in table
    assert table.count("longstraw: ") == 1


def test_a_fault_outweighs_incompleteness_and_cannot_be_allowed(complete: FileStore) -> None:
    (complete.root / ReceiptPlace("demo", 2, "validate_run").name).unlink()
    victim = next((complete.root / "blobs" / "sha256").iterdir())
    victim.unlink()
    victim.write_bytes(b"evil")
    assert invoke("verify", complete.uri).exit_code == 11
    assert invoke("verify", complete.uri, "--allow-incomplete").exit_code == 11


def test_a_store_without_any_receipt_is_not_complete(store: FileStore) -> None:
    store.put_blob(b"blob", "text/plain")
    assert verify_store(store).ok
    assert invoke("verify", store.uri).exit_code == 13
    assert "no receipt of any run" in invoke("verify", store.uri).output


def test_a_work_directory_is_complete_when_it_is_sealed_and_its_run_is(complete: FileStore, tmp_path: Path) -> None:
    seal = seal_directory(tmp_path / "work")
    assert invoke("verify", str(tmp_path / "work")).exit_code == 0
    seal.unlink()
    unsealed = invoke("verify", str(tmp_path / "work"))
    assert unsealed.exit_code == 13
    assert "is not sealed" in unsealed.output
    shutil.rmtree(complete.root / "runs" / "demo" / "0002" / "validate_run")
    seal_directory(tmp_path / "work")
    assert invoke("verify", str(tmp_path / "work")).exit_code == 13

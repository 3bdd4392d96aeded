"""A transaction that ended between its checkpoint and the manifest: nothing takes the half for a whole, or for nothing.

Checkpoints are reached through receipts, manifests and the policy's pointer only; no directory is searched for them.
"""

from pathlib import Path
from typing import Any

import pytest

from longstraw_core.artifacts import PolicyMoved, find_receipt, open_store, read_manifest, read_policy, verify_store
from longstraw_core.artifacts.store import blob_name
from longstraw_core.spec import CheckpointManifest, Descriptor, IntegrityError, SpecError, TransactionSpec
from longstraw_core.stages import execute
from longstraw_core.stages.execute import StageOutcome
from tests.stages.scripted import make_spec, run, run_transaction


class Killed(BaseException):
    """What ends the process in the middle of a stage."""


def checkpoint_of(outcomes: dict[str, StageOutcome]) -> Descriptor:
    return outcomes["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"]


def trained_files(spec: TransactionSpec, outcomes: dict[str, StageOutcome]) -> dict[str, str]:
    """Digests of what training wrote, without the history, which has times in it."""
    tree = outcomes["train"].receipt.predicate.outputs["checkpoint"]
    entries = read_manifest(open_store(spec.storage.uri), tree).entries
    return {entry.path: entry.digest for entry in entries if entry.path != "trainer_state.json"}


@pytest.fixture
def first(spec_fields: dict[str, Any]) -> tuple[TransactionSpec, dict[str, StageOutcome]]:
    """A finished transaction, which the policy `main` points to."""
    spec = make_spec(spec_fields, "storage.policy=main", "data.prompts_per_transaction=1")
    return spec, run_transaction(spec)


@pytest.fixture(params=["train", "manifest_checkpoint"])
def stopped(
    request: pytest.FixtureRequest, first: tuple[TransactionSpec, dict[str, StageOutcome]]
) -> tuple[TransactionSpec, dict[str, StageOutcome]]:
    """The second transaction has published its checkpoint and was killed before the receipt of `train`, or later."""
    spec, outcomes = first
    honest = execute.write_receipt

    def kill(store: Any, predicate: Any) -> Descriptor:
        if predicate.stage == request.param:
            raise Killed
        return honest(store, predicate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "write_receipt", kill)
        with pytest.raises(Killed):
            run_transaction(spec, 2)
    blobs = Path(spec.storage.uri.removeprefix("file://")) / "blobs" / "sha256"
    assert sum(b'"longstraw.trainer-state/1"' in path.read_bytes() for path in blobs.iterdir()) == 2
    return spec, outcomes


def test_it_is_done_again_from_the_complete_one_before(
    stopped: tuple[TransactionSpec, dict[str, StageOutcome]], spec_fields: dict[str, Any], tmp_path: Path
) -> None:
    spec, before = stopped
    store = open_store(spec.storage.uri)
    pointer = read_policy(store, "main")
    assert pointer is not None
    assert pointer.checkpoint == checkpoint_of(before)
    with pytest.raises(SpecError, match="transaction 3 follows transaction 2, whose manifest_checkpoint has not fin"):
        run(spec, "audit_data", 3)

    again = run_transaction(spec, 2)
    manifest = CheckpointManifest.model_validate_json(store.get_bytes(checkpoint_of(again)))
    assert (manifest.parent, manifest.optimizer_steps) == (checkpoint_of(before), 2)
    pointer = read_policy(store, "main")
    assert pointer is not None
    assert pointer.checkpoint == checkpoint_of(again)
    assert verify_store(store).faults == []

    elsewhere = f"storage.uri={(tmp_path / 'uninterrupted').as_uri()}"
    twin = make_spec(spec_fields, "storage.policy=main", "data.prompts_per_transaction=1", elsewhere)
    run_transaction(twin)
    assert trained_files(spec, again) == trained_files(twin, run_transaction(twin, 2))


def test_a_new_run_of_the_policy_starts_from_the_complete_one_or_not_at_all(
    stopped: tuple[TransactionSpec, dict[str, StageOutcome]], spec_fields: dict[str, Any]
) -> None:
    _, before = stopped
    spec = make_spec(spec_fields, "storage.policy=main", "data.prompts_per_transaction=1", "name=new")
    with pytest.raises(PolicyMoved, match="this run starts from a fresh adapter") as refused:
        run(spec, "audit_data")
    assert refused.value.current.checkpoint == checkpoint_of(before)
    assert checkpoint_of(before).digest in str(refused.value)
    following = run_transaction(spec, parent=refused.value.current.checkpoint)
    assert following["train"].receipt.predicate.metrics["optimizer/steps"] == 2


def test_a_checkpoint_without_its_manifest_is_no_parent(
    first: tuple[TransactionSpec, dict[str, StageOutcome]], spec_fields: dict[str, Any]
) -> None:
    _, before = first
    tree = before["train"].receipt.predicate.outputs["checkpoint"]
    nothing = "sha256:" + "0" * 64
    lost = checkpoint_of(before).model_copy(update={"digest": nothing, "uri": blob_name(nothing)})
    spec = make_spec(spec_fields, "data.prompts_per_transaction=1", "name=new")
    for parent, reason in ((tree, rf"{tree.digest} is not a checkpoint manifest: [^\n]*$"), (lost, "0000 is missing")):
        with pytest.raises(IntegrityError, match=reason):
            run(spec, "audit_data", parent=parent)
        assert find_receipt(open_store(spec.storage.uri), "new", 1, "audit_data") is None

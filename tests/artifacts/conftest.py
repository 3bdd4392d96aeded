"""A small finished run of two chained transactions, published through the public interface only."""

import os
import shutil
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    FileStore,
    describe_external_file,
    describe_external_tree,
    publish_tree,
    read_manifest,
    receipt_name,
    seal_directory,
    write_receipt,
)
from longstraw_core.artifacts.store import Store
from longstraw_core.spec import CheckpointManifest, Descriptor, canonical_json, sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT, MEDIA_TYPE_JSON_LINES
from longstraw_core.spec.receipts import CheckpointFile, Phase, RankRecord, ReceiptPredicate

SPEC_DIGEST = sha256_digest(b"spec")


def predicate(
    stage: str,
    transaction: int,
    inputs: dict[str, Descriptor],
    outputs: dict[str, Descriptor],
    *,
    run: str = "demo",
    seconds: float = 1.5,
) -> ReceiptPredicate:
    """A receipt predicate with everything filled in that the tests do not care about."""
    return ReceiptPredicate(
        stage=stage,  # type: ignore[arg-type]
        run=run,
        transaction=transaction,
        spec_digest=SPEC_DIGEST,
        source_digest=sha256_digest(b"source"),
        image_digest=None,
        gradient="exact",
        seed=7,
        inputs=inputs,
        outputs=outputs,
        context_parallel=1,
        expert_parallel=1,
        ranks=(RankRecord(rank=0, device="cpu", phases=(Phase(name="work", seconds=seconds, peak_memory_bytes=1),)),),
        versions={"python": "3"},
        metrics={"reward": 0.25},
        status="ok",
    )


def publish_run(workdir: Path, snapshot: Path, data: Path, *, run: str = "demo", transactions: int = 2) -> FileStore:
    """Publish `transactions` transactions of audit_data -> train -> manifest_checkpoint into `workdir/store`."""
    store = FileStore(workdir / "store", create=True)
    publish_run_into(store, workdir.parent, snapshot, data, run=run, transactions=transactions)
    return store


def publish_run_into(
    store: Store,
    beside: Path,
    snapshot: Path,
    data: Path,
    *,
    run: str = "demo",
    transactions: int = 2,
    parent: Descriptor | None = None,
    lineage: int = 0,
) -> Descriptor:
    """The same into any store; `parent` is the checkpoint of another run. Returns the last checkpoint manifest."""
    scratch = beside / f"scratch-{os.getpid()}"
    parent_receipt: Descriptor | None = None
    inherited = {} if parent is None else {"external:parent_checkpoint": parent}
    external = {
        "external:model_snapshot": describe_external_tree(store, snapshot),
        "external:data": describe_external_file(data, MEDIA_TYPE_JSON_LINES),
    }
    for transaction in range(1, transactions + 1):
        prompts = store.put_blob(f"prompts of {run} {transaction}\n".encode(), MEDIA_TYPE_JSON_LINES)
        inputs = external | (inherited if transaction == 1 else {})
        audit = write_receipt(store, predicate("audit_data", transaction, inputs, {"prompts": prompts}, run=run))

        adapter = scratch / f"adapter-{transaction}"
        (adapter / "state").mkdir(parents=True)
        (adapter / "adapter.safetensors").write_bytes(f"weights {run} {transaction}".encode() * 20)
        (adapter / "state" / "optimizer.bin").write_bytes(bytes(range(transaction, 100)))
        (adapter / "empty").write_bytes(b"")
        tree = publish_tree(store, adapter)
        inputs = {"receipt:audit_data": audit, "audit_data/prompts": prompts}
        if parent is not None and parent_receipt is not None:
            inputs["previous:receipt:manifest_checkpoint"] = parent_receipt
            inputs["previous:manifest_checkpoint/checkpoint"] = parent
        trained = write_receipt(store, predicate("train", transaction, inputs, {"adapter": tree}, run=run))

        manifest = CheckpointManifest(
            run=run,
            transaction=transaction,
            lineage=lineage + transaction,
            data_position=lineage + transaction,
            stepped=True,
            optimizer_steps=transaction,
            tree=tree,
            files=tuple(
                CheckpointFile(path=entry.path, digest=entry.digest, size=entry.size)
                for entry in read_manifest(store, tree).entries
            ),
            parent=parent,
            model_snapshot=external["external:model_snapshot"],
            spec_digest=SPEC_DIGEST,
            gradient="exact",
            receipts={"audit_data": audit.digest, "train": trained.digest},
        )
        parent = store.put_blob(canonical_json(manifest), MEDIA_TYPE_CHECKPOINT)
        inputs = {"receipt:train": trained, "train/adapter": tree}
        outputs = {"checkpoint": parent}
        parent_receipt = write_receipt(store, predicate("manifest_checkpoint", transaction, inputs, outputs, run=run))
    shutil.rmtree(scratch, ignore_errors=True)
    assert parent is not None
    return parent


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """An empty store."""
    return FileStore(tmp_path / "store", create=True)


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model snapshot directory, outside every store."""
    directory = tmp_path_factory.mktemp("model") / "snapshot"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"\x00weights" * 10)
    return directory


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data file, outside every store."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text('{"prompt": "1+1"}\n')
    return path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, snapshot: Path, data_file: Path) -> Path:
    """A sealed run directory that tests copy and never change."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    workdir.mkdir()
    publish_run(workdir, snapshot, data_file)
    (workdir / "spec.json").write_text("{}")
    (workdir / "logs").mkdir()
    (workdir / "logs" / "train.log").write_text("done\n")
    (workdir / ".lock").write_text("")
    seal_directory(workdir)
    return workdir


@pytest.fixture
def run_directory(finished_run: Path, tmp_path: Path) -> Path:
    """A private copy of the finished run, at another path than where it ran."""
    return Path(shutil.copytree(finished_run, tmp_path / "moved run", symlinks=True))


@pytest.fixture
def make_predicate():
    """The function that builds receipt predicates."""
    return predicate


@pytest.fixture
def make_run():
    """The function that publishes a run."""
    return publish_run


@pytest.fixture
def receipt_path():
    """The function from run directory, transaction and stage to the receipt's path."""
    return lambda workdir, transaction, stage: workdir / "store" / receipt_name("demo", transaction, stage)

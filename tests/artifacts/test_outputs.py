"""Before earlier work is reused, every byte it published is hashed again."""

from pathlib import Path

import pytest

from longstraw_core.artifacts import FileStore, publish_tree, read_receipt, write_receipt
from longstraw_core.artifacts.outputs import check_receipt_outputs
from longstraw_core.spec import IntegrityError, StageReceipt

from .conftest import predicate


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store", create=True)


@pytest.fixture
def receipt(store: FileStore, tmp_path: Path) -> StageReceipt:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "weights").write_bytes(b"w" * 1000)
    (tree / "empty").write_bytes(b"")
    outputs = {"adapter": publish_tree(store, tree), "report": store.put_blob(b"report", "text/html")}
    return read_receipt(store, write_receipt(store, predicate("export_lora", 1, {}, outputs)))


def test_all_bytes_of_blobs_and_trees_are_counted(store: FileStore, receipt: StageReceipt) -> None:
    manifest = receipt.predicate.outputs["adapter"].size
    assert check_receipt_outputs(store, receipt) == manifest + 1000 + 0 + len(b"report")


def test_a_changed_a_missing_and_a_replaced_file_are_all_named(store: FileStore, receipt: StageReceipt) -> None:
    blobs = {path: path.read_bytes() for path in (store.root / "blobs" / "sha256").iterdir()}
    weights = next(path for path, content in blobs.items() if content == b"w" * 1000)
    report = next(path for path, content in blobs.items() if content == b"report")
    weights.chmod(0o644)
    weights.write_bytes(b"w" * 999 + b"W")
    report.unlink()
    with pytest.raises(IntegrityError) as caught:
        check_receipt_outputs(store, receipt)
    assert "export_lora/adapter/weights" in str(caught.value)
    assert "export_lora/report" in str(caught.value)
    report.symlink_to(weights)
    with pytest.raises(IntegrityError, match="symlink"):
        check_receipt_outputs(store, receipt)

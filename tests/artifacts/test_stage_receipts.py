"""Receipts: written once, last, in one byte form, and only believed where they say they belong."""

import json
from pathlib import Path

import pytest

from longstraw_core.artifacts import (
    AlreadyPublished,
    FileStore,
    ReceiptPlace,
    find_receipt,
    list_receipts,
    publish_tree,
    read_receipt,
    receipt_name,
    split_receipt_uri,
    write_receipt,
)
from longstraw_core.artifacts.receipts import InputKey, parse_input_key, parse_receipt, place_of
from longstraw_core.artifacts.store import blob_name
from longstraw_core.spec import Descriptor, IntegrityError, SpecError, canonical_json, sha256_digest

NAME = "runs/demo/0001/train/receipt.json"


@pytest.fixture
def output(store: FileStore) -> Descriptor:
    """A stored output."""
    return store.put_blob(b"output", "application/octet-stream")


@pytest.fixture
def receipt(store: FileStore, output: Descriptor, make_predicate) -> Descriptor:
    """The receipt of train in transaction 1 of run demo."""
    return write_receipt(store, make_predicate("train", 1, {}, {"adapter": output}))


def test_a_receipt_is_an_in_toto_statement_that_other_tools_can_read(
    store: FileStore, receipt: Descriptor, output: Descriptor
) -> None:
    statement = json.loads((store.root / NAME).read_bytes())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "urn:longstraw:stage-receipt:1"
    assert statement["subject"] == [{"name": "adapter", "digest": {"sha256": output.hex}}]
    assert receipt.uri == NAME
    assert receipt.digest == sha256_digest((store.root / NAME).read_bytes())


def test_a_receipt_reads_back_equal(store: FileStore, receipt: Descriptor, output: Descriptor, make_predicate) -> None:
    assert find_receipt(store, "demo", 1, "train") == receipt
    assert find_receipt(store, "demo", 2, "train") is None
    assert read_receipt(store, receipt).predicate == make_predicate("train", 1, {}, {"adapter": output})
    assert [place.name for place in list_receipts(store)] == [NAME]
    assert list(list_receipts(store, "other")) == []


def test_the_same_receipt_again_succeeds_and_another_is_refused(
    store: FileStore, receipt: Descriptor, output: Descriptor, make_predicate
) -> None:
    assert write_receipt(store, make_predicate("train", 1, {}, {"adapter": output})) == receipt
    with pytest.raises(AlreadyPublished, match="already published") as caught:
        write_receipt(store, make_predicate("train", 1, {}, {"adapter": output}, seconds=9.0))
    assert caught.value.published == receipt


def test_a_receipt_before_its_outputs_or_without_any_is_refused(
    store: FileStore, output: Descriptor, make_predicate
) -> None:
    (store.root / output.uri).unlink()
    with pytest.raises(IntegrityError, match=r"output 'adapter' .* is not in the store"):
        write_receipt(store, make_predicate("train", 1, {}, {"adapter": output}))
    with pytest.raises(SpecError, match="subject"):
        write_receipt(store, make_predicate("train", 1, {}, {}))
    assert list(list_receipts(store)) == []


def test_a_receipt_of_a_tree_that_lost_a_file_is_refused_by_the_files_name(
    store: FileStore, make_predicate, tmp_path: Path
) -> None:
    (tmp_path / "adapter" / "state").mkdir(parents=True)
    (tmp_path / "adapter" / "weights").write_bytes(b"weights")
    (tmp_path / "adapter" / "state" / "optimizer").write_bytes(b"moments")
    tree = publish_tree(store, tmp_path / "adapter")
    lost = blob_name(sha256_digest(b"moments"))
    (store.root / lost).unlink()
    with pytest.raises(IntegrityError, match=rf"'adapter' .*/state/optimizer \({lost}\) is not in the store;"):
        write_receipt(store, make_predicate("train", 1, {}, {"adapter": tree}))
    assert list(list_receipts(store)) == []
    assert publish_tree(store, tmp_path / "adapter") == tree
    write_receipt(store, make_predicate("train", 1, {}, {"adapter": tree}))


@pytest.mark.parametrize("run", ["", "a/b", "..", ".hidden", "a b", "a" * 129, "ü"])
def test_run_names_that_are_no_safe_path_are_refused(
    store: FileStore, output: Descriptor, make_predicate, run: str
) -> None:
    with pytest.raises(SpecError):
        receipt_name(run, 1, "train")


def test_names_and_places_are_inverse() -> None:
    place = place_of(NAME)
    assert place is not None
    assert (place.run, place.transaction, place.stage, place.name) == ("demo", 1, "train", NAME)
    for name in (
        "runs/demo/1/train/receipt.json",
        "runs/demo/0001/nothing/receipt.json",
        "runs/demo/0000/train/receipt.json",
    ):
        assert place_of(name) is None
    with pytest.raises(SpecError):
        receipt_name("demo", 10_000, "train")


def mutations(value: dict) -> dict[str, bytes]:
    """Hostile variants of a receipt's bytes."""
    canonical = canonical_json(value)
    other_type = {**value, "_type": "https://in-toto.io/Statement/v0.1"}
    by_field_name = {("type" if key == "_type" else key): item for key, item in value.items()}
    huge = {**value, "predicate": {**value["predicate"], "seed": 0}}
    return {
        "indented": json.dumps(value, indent=1).encode(),
        "keys in another order": json.dumps(dict(reversed(value.items())), separators=(",", ":")).encode(),
        "trailing newline": canonical + b"\n",
        "duplicate key": canonical[:-1] + b',"_type":"https://in-toto.io/Statement/v1"}',
        "unescaped form": canonical.replace(b'"demo"', b'"\\u0064emo"'),
        "float for integer": canonical.replace(b'"seed":7', b'"seed":7.0'),
        "2^53+1": canonical_json(huge).replace(b'"seed":0', b'"seed":9007199254740993'),
        "2^53": canonical_json(huge).replace(b'"seed":0', b'"seed":9007199254740992'),
        "5000 digits": canonical_json(huge).replace(b'"seed":0', b'"seed":' + b"9" * 5000),
        "NaN": canonical.replace(b'"seed":7', b'"seed":NaN'),
        "negative": canonical.replace(b'"seed":7', b'"seed":-1'),
        "other statement type": canonical_json(other_type),
        "python field name": canonical_json(by_field_name),
        "unknown field": canonical_json({**value, "extra": 1}),
        "no subject": canonical_json({**value, "subject": []}),
        "subject of other bytes": canonical_json(
            {**value, "subject": [{"name": "adapter", "digest": {"sha256": "0" * 64}}]}
        ),
        "not UTF-8": canonical.replace(b"demo", b"dem\xff"),
        "byte order mark": b"\xef\xbb\xbf" + canonical,
        "truncated": canonical[:-1],
        "empty": b"",
        "array": b"[]",
        "nested too deep": b"[" * 100_000,
        "other run": canonical_json({**value, "predicate": {**value["predicate"], "run": "other"}}),
        "other transaction": canonical_json({**value, "predicate": {**value["predicate"], "transaction": 2}}),
        "other stage": canonical_json({**value, "predicate": {**value["predicate"], "stage": "sample"}}),
    }


def test_every_hostile_receipt_is_refused_by_name(store: FileStore, receipt: Descriptor) -> None:
    content = store.get_bytes(receipt)
    value = json.loads(content)
    parse_receipt(content, name=NAME, expected_digest=receipt.digest)
    for title, hostile in mutations(value).items():
        assert hostile != content, title
        with pytest.raises(IntegrityError, match=NAME):
            parse_receipt(hostile, name=NAME)
        with pytest.raises(IntegrityError, match=f"{NAME}: expected {receipt.digest}"):
            parse_receipt(hostile, name=NAME, expected_digest=receipt.digest)


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        ("receipt:train", InputKey("receipt", "train", "", previous=False)),
        ("train/adapter", InputKey("output", "train", "adapter", previous=False)),
        ("external:data", InputKey("external", None, "data", previous=False)),
        ("previous:receipt:train", InputKey("receipt", "train", "", previous=True)),
        ("previous:train/a/b", InputKey("output", "train", "a/b", previous=True)),
    ],
)
def test_input_keys_say_where_an_input_came_from(key: str, parsed: InputKey) -> None:
    assert parse_input_key(key) == parsed


@pytest.mark.parametrize(
    "key", ["", "train", "train/", "/x", "receipt:", "receipt:x", "external:", "previous:external:x"]
)
def test_other_input_keys_are_refused(store: FileStore, output: Descriptor, make_predicate, key: str) -> None:
    with pytest.raises(SpecError, match="input key"):
        write_receipt(store, make_predicate("train", 1, {key: output}, {"adapter": output}))


@pytest.mark.parametrize("root", ["s3://bucket", "s3://bucket/runs", "s3://bucket/a/runs/b", "file:///runs/runs"])
@pytest.mark.parametrize("run", ["nightly", "runs", "0001"])
def test_the_uri_of_a_receipt_is_split_whatever_prefix_and_run_are_called(root: str, run: str) -> None:
    place = ReceiptPlace(run, 2, "train")
    assert split_receipt_uri(f"{root}/{place.name}") == (root, place)
    for other in (root, f"{root}/runs/{run}", f"{root}/runs/{run}/0000/train/receipt.json"):
        assert split_receipt_uri(other) == (other, None)

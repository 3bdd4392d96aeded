"""Directories: only plain files with safe names go in, exactly the same files come out."""

import hashlib
import os
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longstraw_core.artifacts import (
    FileStore,
    build_tree,
    check_directory,
    describe_external_file,
    describe_external_tree,
    left_out,
    materialize_tree,
    publish_manifest,
    publish_tree,
    read_external_manifest,
    read_manifest,
    require_external,
)
from longstraw_core.artifacts.external import is_hidden
from longstraw_core.spec import IntegrityError, SpecError, TreeEntry, TreeManifest, canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_BYTES, MEDIA_TYPE_TREE


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with an empty file, nested files and names in several scripts."""
    root = tmp_path / "tree"
    for name, content in {
        "config.json": b"{}",
        "empty": b"",
        "deep/er/weights.bin": bytes(range(256)) * 5000,
        "ünï/日本語 with spaces.txt": "grüße".encode(),
        ".hidden": b"h",
        "emoji-🦙": b"llama",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_manifest_agrees_with_hashlib_and_does_not_depend_on_times_modes_or_order(tree: Path, tmp_path: Path) -> None:
    manifest = build_tree(tree)
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    expected = {
        path.relative_to(tree).as_posix(): ("sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()) for path in files
    }
    assert {entry.path: entry.digest for entry in manifest.entries} == expected
    assert [entry.path for entry in manifest.entries] == sorted(expected)
    other = tmp_path / "other"
    for path in reversed(files):
        copy = other / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1, 1))
    (other / "an empty directory").mkdir()
    assert canonical_json(build_tree(other)) == canonical_json(manifest)


def test_a_published_tree_comes_back_whole(store: FileStore, tree: Path, tmp_path: Path) -> None:
    descriptor = publish_tree(store, tree)
    assert descriptor.media_type == MEDIA_TYPE_TREE
    assert read_manifest(store, descriptor) == build_tree(tree)
    assert materialize_tree(store, descriptor, tmp_path / "out") == build_tree(tmp_path / "out")
    assert check_directory(tmp_path / "out", read_manifest(store, descriptor)) == []
    assert sorted(os.listdir(tmp_path)) == ["out", "store", "tree"]
    assert publish_tree(store, tmp_path / "out") == descriptor


def test_an_empty_directory_is_a_tree_of_no_files(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    descriptor = publish_tree(store, tmp_path / "void")
    materialize_tree(store, descriptor, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_materializing_refuses_an_existing_destination(store: FileStore, tree: Path, tmp_path: Path) -> None:
    descriptor = publish_tree(store, tree)
    (tmp_path / "out").mkdir()
    with pytest.raises(SpecError, match="exists already"):
        materialize_tree(store, descriptor, tmp_path / "out")


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_one_bad_blob_leaves_no_destination(store: FileStore, tree: Path, tmp_path: Path, damage: str) -> None:
    descriptor = publish_tree(store, tree)
    victim = store.root / "blobs" / "sha256" / hashlib.sha256(b"llama").hexdigest()
    victim.unlink()
    if damage == "flip":
        victim.write_bytes(b"lbama")
    with pytest.raises(IntegrityError, match="emoji-🦙"):
        materialize_tree(store, descriptor, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["store", "tree"]


def test_a_descriptor_of_something_else_is_no_tree(store: FileStore, tmp_path: Path) -> None:
    blob = store.put_blob(b"{}", MEDIA_TYPE_BYTES)
    with pytest.raises(IntegrityError, match="expected a tree"):
        materialize_tree(store, blob, tmp_path / "out")
    for content in (b"{}", b"not json", b'{"entries":[{"path":"../up"}],"kind":"longstraw.tree/1"}', b"[]", b""):
        fake = store.put_blob(content, MEDIA_TYPE_TREE)
        with pytest.raises(IntegrityError):
            materialize_tree(store, fake, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def plant(kind: str, path: Path) -> None:
    """Put something hostile at a path."""
    path.parent.mkdir(exist_ok=True)
    if kind == "symlink":
        path.symlink_to("config.json")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "directory symlink":
        path.symlink_to("deep", target_is_directory=True)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        bound = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path.parent)  # socket paths are short
        bound.bind(path.name)
        os.chdir(here)
        bound.close()


@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory symlink", "fifo", "socket"])
def test_what_is_no_regular_file_is_refused_by_name(store: FileStore, tree: Path, kind: str) -> None:
    plant(kind, tree / "sub" / "culprit")
    for function in (build_tree, lambda directory: publish_tree(store, directory)):
        with pytest.raises(SpecError, match=r"sub/culprit is a (symlink|special file)"):
            function(tree)
    assert not (store.root / "blobs").exists()


@pytest.mark.parametrize(
    "name", [b"back\\slash", b"new\nline", b"\xff\xfe", b"tab\t", b"delete\x7f", b"a" * 250 + b"\\"], ids=repr
)
def test_hostile_names_are_refused(tree: Path, name: bytes) -> None:
    with open(os.fsencode(tree) + b"/" + name, "wb"):
        pass
    with pytest.raises(SpecError, match="cannot be part of a tree"):
        build_tree(tree)


@pytest.mark.parametrize(
    ("one", "other"),
    [("A.txt", "a.txt"), ("stra\u00dfe", "STRASSE"), ("caf\u00e9", "cafe\u0301"), ("Dir/x", "dir/y"), ("K", "\u212a")],
)
def test_names_that_are_one_on_some_file_system_are_refused(tmp_path: Path, one: str, other: str) -> None:
    root = tmp_path / "tree"
    for name in (one, other):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    with pytest.raises(SpecError, match="collide; rename one"):
        build_tree(root)


def test_a_missing_directory_a_file_and_a_symlink_are_no_tree(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    for name in ("absent", "tree/config.json", "link"):
        with pytest.raises(SpecError, match=name):
            build_tree(tmp_path / name)


def test_every_kind_of_fault_is_reported_at_once(tree: Path) -> None:
    manifest = build_tree(tree)
    (tree / "config.json").write_bytes(b"[]")
    (tree / "empty").unlink()
    (tree / ".hidden").unlink()
    plant("symlink", tree / ".hidden")
    (tree / "emoji-🦙").unlink()
    plant("fifo", tree / "emoji-🦙")
    (tree / "extra").write_bytes(b"")
    faults = check_directory(tree, manifest)
    assert [(fault.kind, fault.path) for fault in faults] == [
        ("symlink", ".hidden"),
        ("changed", "config.json"),
        ("special", "emoji-🦙"),
        ("missing", "empty"),
        ("extra", "extra"),
    ]
    assert hashlib.sha256(b"{}").hexdigest() in faults[1].expected
    assert hashlib.sha256(b"[]").hexdigest() in faults[1].observed
    assert [fault.kind for fault in check_directory(tree / "absent", manifest)] == ["missing"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_any_flipped_byte_of_a_tree_is_found(tree: Path, choice: st.DataObject) -> None:
    manifest = build_tree(tree)
    entry = choice.draw(st.sampled_from([entry for entry in manifest.entries if entry.size]))
    position = choice.draw(st.integers(0, entry.size - 1))
    path = tree / entry.path
    original = path.read_bytes()
    path.write_bytes(original[:position] + bytes([original[position] ^ 0x80]) + original[position + 1 :])
    assert [(fault.kind, fault.path) for fault in check_directory(tree, manifest)] == [("changed", entry.path)]
    path.write_bytes(original)


def test_a_forged_manifest_cannot_make_a_tree_write_outside_its_destination(store: FileStore, tmp_path: Path) -> None:
    blob = store.put_blob(b"evil", MEDIA_TYPE_BYTES)
    forged = {
        "kind": "longstraw.tree/1",
        "entries": [{"path": "../escaped", "digest": blob.digest, "size": blob.size}],
    }
    descriptor = store.put_blob(canonical_json(forged), MEDIA_TYPE_TREE)
    with pytest.raises(IntegrityError, match=r"\.\."):
        materialize_tree(store, descriptor, tmp_path / "out")
    assert not (tmp_path / "escaped").exists()


def test_a_snapshot_stays_outside_and_is_rehashed_where_it_lies(store: FileStore, tree: Path, tmp_path: Path) -> None:
    descriptor = describe_external_tree(store, tree)
    assert descriptor.uri == tree.as_uri() + "/"
    assert store.list_names() == [f"blobs/sha256/{descriptor.hex}"]
    assert read_external_manifest(store, descriptor) == build_tree(tree, skip=is_hidden)
    require_external(store, descriptor)
    os.rename(tree, tmp_path / "moved")
    with pytest.raises(IntegrityError, match="cannot be reached"):
        require_external(store, descriptor)
    require_external(store, descriptor, path=tmp_path / "moved")
    (tmp_path / "moved" / "config.json").write_bytes(b"[]")
    with pytest.raises(IntegrityError, match=r"moved/config\.json: config\.json changed: expected"):
        require_external(store, descriptor, path=tmp_path / "moved")


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A snapshot as `huggingface-cli download --local-dir` and git leave it, and where its digest must not differ."""
    directory = tmp_path / "downloaded"
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "sub/vocab.txt"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def test_hidden_names_are_no_part_of_a_snapshot_and_are_listed(store: FileStore, downloaded: Path) -> None:
    before = describe_external_tree(store, downloaded)
    assert left_out(downloaded) == []
    hidden = (
        ".cache/huggingface/download/config.json.metadata",
        ".git/objects/ab/cd",
        ".gitattributes",
        "sub/.DS_Store",
    )
    for name in hidden:
        (downloaded / name).parent.mkdir(parents=True, exist_ok=True)
        (downloaded / name).write_text("differs from one download to the next")
    (downloaded / ".git" / "link").symlink_to("elsewhere")
    assert describe_external_tree(store, downloaded) == before
    require_external(store, before)
    assert left_out(downloaded) == [".cache", ".git", ".gitattributes", "sub/.DS_Store"]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "sub/vocab.txt", "a.hidden.not", "__init__.py", "model.safetensors.index.json"]
)
def test_whatever_does_not_begin_with_a_dot_is_part_of_a_snapshot(
    store: FileStore, downloaded: Path, name: str
) -> None:
    before = describe_external_tree(store, downloaded)
    (downloaded / name).write_text("another")
    assert describe_external_tree(store, downloaded).digest != before.digest
    with pytest.raises(IntegrityError, match=name):
        require_external(store, before)


def test_a_hidden_file_that_an_older_manifest_names_is_still_checked(store: FileStore, downloaded: Path) -> None:
    (downloaded / ".cache").mkdir()
    (downloaded / ".cache" / "kept").write_text("x")
    manifest = build_tree(downloaded)
    assert check_directory(downloaded, manifest, skip=is_hidden) == []
    (downloaded / ".cache" / "kept").write_text("y")
    assert [fault.path for fault in check_directory(downloaded, manifest, skip=is_hidden)] == [".cache/kept"]


def test_an_external_file_is_rehashed_where_it_lies(store: FileStore, tmp_path: Path) -> None:
    path = tmp_path / "rows #1.jsonl"
    path.write_bytes(b"{}\n")
    descriptor = describe_external_file(path, "application/jsonl")
    assert descriptor.hex == hashlib.sha256(b"{}\n").hexdigest()
    require_external(store, descriptor)
    path.write_bytes(b"[]\n")
    with pytest.raises(IntegrityError, match="changed"):
        require_external(store, descriptor)
    path.unlink()
    with pytest.raises(SpecError, match="rows #1"):
        describe_external_file(path, "application/jsonl")


def test_a_manifest_may_name_ten_thousand_files(store: FileStore) -> None:
    digest = "sha256:" + "0" * 64
    entries = tuple(TreeEntry(path=f"{number:05d}", digest=digest, size=0) for number in range(10_000))
    descriptor = publish_manifest(store, TreeManifest(entries=entries))
    assert len(read_manifest(store, descriptor).entries) == 10_000

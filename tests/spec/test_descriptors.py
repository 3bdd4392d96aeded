"""Descriptors and tree manifests: an invalid one cannot be constructed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from longstraw_core.spec import Descriptor, TreeEntry, TreeManifest
from longstraw_core.spec.descriptors import check_relative_path

DIGEST = "sha256:" + "ab" * 32


def manifest(*paths: str) -> TreeManifest:
    """A manifest of empty files in the order given."""
    return TreeManifest(entries=tuple(TreeEntry(path=path, digest=DIGEST, size=0) for path in paths))


def test_a_descriptor_says_its_digest_without_the_prefix() -> None:
    assert Descriptor(uri="blobs/x", digest=DIGEST, size=0, media_type="text/plain").hex == "ab" * 32


@pytest.mark.parametrize(
    "change",
    [
        {"uri": ""},
        {"digest": "ab" * 32},
        {"digest": "sha256:" + "AB" * 32},
        {"digest": DIGEST + "\n"},
        {"digest": "sha512:" + "ab" * 64},
        {"size": -1},
        {"size": 1.0},
        {"size": "1"},
        {"size": True},
        {"size": 2**53},
        {"media_type": ""},
        {"extra": 1},
    ],
    ids=str,
)
def test_an_invalid_descriptor_cannot_be_made(change: dict[str, object]) -> None:
    valid: dict[str, object] = {"uri": "blobs/x", "digest": DIGEST, "size": 1, "media_type": "text/plain"}
    Descriptor.model_validate(valid)
    with pytest.raises(ValidationError):
        Descriptor.model_validate(valid | change)


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "/", "/etc/passwd", "a/", "a//b", "./a", "a/.", "../a", "a/../b", "a/..", "a\\b", "a\0", "a\nb",
     "a\x7f", "\udcff", "x" * 256, "x/" * 512 + "x", "\u00e9" * 128],
    ids=lambda path: repr(path[:12]),
)  # fmt: skip
def test_unsafe_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        check_relative_path(path)
    with pytest.raises(ValidationError):
        TreeEntry(path=path, digest=DIGEST, size=0)


@pytest.mark.parametrize(
    "path", ["a", "a/b", ".hidden", "...", "a b", "..a", "ünï/日本", "-rf", "~", "$HOME", "x" * 255]
)
def test_strange_but_safe_paths_are_kept_as_they_are(path: str) -> None:
    assert check_relative_path(path) == path


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("b", "a"), "sorted"),
        (("a", "a"), "twice"),
        (("A", "a"), "collide"),
        (("caf\u0065\u0301", "caf\u00e9"), "collide"),
        (("STRASSE", "stra\u00dfe"), "collide"),
        (("Dir/one", "dir/two"), "collide"),
        (("a/B/one", "a/b/two"), "collide"),
        (("a", "a/b"), "both a file and a directory"),
        (("A", "a/b"), "both a file and a directory"),
    ],
)
def test_manifests_that_no_file_system_could_hold_are_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        manifest(*paths)


def test_a_manifest_sums_its_sizes() -> None:
    assert manifest().total_bytes == 0
    entries = tuple(TreeEntry(path=name, digest=DIGEST, size=size) for name, size in (("a", 3), ("b", 4)))
    assert TreeManifest(entries=entries).total_bytes == 7


@given(st.sets(st.text(alphabet="abcxyz0189", min_size=1, max_size=6)))
def test_any_set_of_distinct_plain_names_makes_one_manifest(names: set[str]) -> None:
    assert [entry.path for entry in manifest(*sorted(names)).entries] == sorted(names)

"""Descriptors of immutable bytes (OCI's shape) and of directories made of them."""

import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from longstraw_core.spec.model import Count, Sha256, StrictModel

MEDIA_TYPE_JSON = "application/json"
MEDIA_TYPE_JSON_LINES = "application/jsonl"
MEDIA_TYPE_PARQUET = "application/vnd.apache.parquet"
MEDIA_TYPE_HTML = "text/html"
MEDIA_TYPE_BYTES = "application/octet-stream"
MEDIA_TYPE_TREE = "application/vnd.longstraw.tree.v1+json"
MEDIA_TYPE_RECEIPT = "application/vnd.in-toto+json"
MEDIA_TYPE_CHECKPOINT = "application/vnd.longstraw.checkpoint-manifest.v1+json"


class Descriptor(StrictModel):
    """Where immutable bytes are and what they must be: `{uri, digest, size, media_type}`."""

    uri: Annotated[str, Field(min_length=1)]
    digest: Sha256
    size: Count
    media_type: Annotated[str, Field(min_length=1)]

    @property
    def hex(self) -> str:
        """The digest without its `sha256:` prefix."""
        return self.digest.removeprefix("sha256:")


MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
"""Longest relative path (S3's limit for keys) and longest part of it (Linux's), in UTF-8 bytes."""


def check_relative_path(path: str) -> str:
    """Return `path` if it is a safe relative POSIX path inside a tree; raise ValueError otherwise."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"path {path!r} is not valid Unicode") from error
    if len(encoded) > MAX_PATH_BYTES or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        raise ValueError(f"path {path!r} is longer than {MAX_PATH_BYTES} bytes, or a part than {MAX_NAME_BYTES}")
    if not path or path.startswith("/") or "\\" in path or "\0" in path:
        raise ValueError(f"path {path!r} must be relative, with forward slashes and no NUL")
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise ValueError(f"path {path!r} contains control characters")
    if any(part in ("", ".", "..") for part in path.split("/")) or str(PurePosixPath(path)) != path:
        raise ValueError(f"path {path!r} must not contain empty, '.' or '..' parts")
    return path


def check_collisions(paths: Iterable[str]) -> None:
    """Raise ValueError if two paths, or two directories they lie in, are one on some file system.

    Names that differ only in case or Unicode composition are one on common file systems, and a name cannot be both a
    file and a directory.
    """
    files: dict[str, str] = {}
    directories: dict[str, str] = {}
    for path in paths:
        end = path.find("/")
        while end >= 0:
            directory = path[:end]
            other = directories.setdefault(_folded(directory), directory)
            if other != directory:
                raise ValueError(f"tree directories {other!r} and {directory!r} collide; rename one")
            end = path.find("/", end + 1)
        other = files.setdefault(_folded(path), path)
        if other != path:
            raise ValueError(f"tree paths {other!r} and {path!r} collide; rename one")
    for folded in files.keys() & directories.keys():
        raise ValueError(f"tree path {files[folded]!r} is both a file and a directory")


def _folded(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())


class TreeEntry(StrictModel):
    """One file of a tree: its relative path, digest and size."""

    path: str
    digest: Sha256
    size: Count

    @field_validator("path")
    @classmethod
    def _safe(cls, path: str) -> str:
        return check_relative_path(path)


class TreeManifest(StrictModel):
    """A directory as a sorted list of files; its digest does not depend on file order, times or owners."""

    kind: Literal["longstraw.tree/1"] = "longstraw.tree/1"
    entries: tuple[TreeEntry, ...]

    @model_validator(mode="after")
    def _canonical(self) -> "TreeManifest":
        paths = [entry.path for entry in self.entries]
        for path, following in pairwise(paths):
            if path == following:
                raise ValueError(f"tree path {path!r} appears twice")
            if path > following:
                raise ValueError(f"tree entries must be sorted by path; {path!r} comes before {following!r}")
        check_collisions(paths)
        return self

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of all files, in bytes."""
        return sum(entry.size for entry in self.entries)

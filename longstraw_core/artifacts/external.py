"""Inputs that stay outside the store (model snapshot, data file): described by digest, re-hashed where they lie.

An external file's descriptor carries its absolute `file://` URI, digest and size. An external tree's descriptor has
media type tree, the digest and size of its *manifest*, whose blob is in the store, and the directory's `file://` URI
with a trailing slash; the files themselves are not copied. Names that begin with a dot (`.git`, `.cache/huggingface`,
`.gitattributes`, …) are left out of such a tree: tools put them beside a model, none of them is part of it, and they
differ from one download to the next.
"""

import os
from pathlib import Path

from longstraw_core.artifacts.faults import Fault
from longstraw_core.artifacts.files import (
    Measured,
    UnsafeFile,
    absolute_unresolved,
    measure_file,
    reporting,
    walk_directory,
)
from longstraw_core.artifacts.store import Store, blob_name, path_of_file_uri
from longstraw_core.artifacts.trees import build_tree, check_directory, publish_manifest, read_manifest
from longstraw_core.spec.descriptors import MEDIA_TYPE_TREE, Descriptor, TreeManifest
from longstraw_core.spec.errors import IntegrityError, SpecError


def describe_external_file(path: Path, media_type: str) -> Descriptor:
    """Hash a local file that stays where it is and return its descriptor.

    Raises:
        SpecError: it is missing, unreadable or not a regular file.
    """
    absolute = absolute_unresolved(path)
    with reporting(f"reading {path}"):
        try:
            measured = measure_file(absolute.parent, absolute.name)
        except UnsafeFile as error:
            raise SpecError(str(error)) from error
    return Descriptor(uri=absolute.as_uri(), digest=measured.digest, size=measured.size, media_type=media_type)


def describe_external_tree(store: Store, directory: Path) -> Descriptor:
    """Hash a directory that stays where it is, put its manifest (not its files) into the store, return its descriptor.

    Hidden names are left out.

    Raises:
        SpecError: it is missing or holds something that is no regular file.
    """
    absolute = absolute_unresolved(directory)
    manifest = publish_manifest(store, build_tree(absolute, skip=is_hidden))
    return manifest.model_copy(update={"uri": absolute.as_uri() + "/"})


def is_hidden(path: str) -> bool:
    """Whether the last part of a relative path begins with a dot: not part of an external tree, nor what is below."""
    return path.rpartition("/")[2].startswith(".")


def left_out(directory: Path) -> list[str]:
    """What `describe_external_tree` leaves out of a directory, sorted; of a hidden directory only itself."""
    passed_over: list[str] = []

    def skip(path: str) -> bool:
        if hidden := is_hidden(path):
            passed_over.append(path)
        return hidden

    with reporting(f"reading directory {directory}"):
        for _ in walk_directory(absolute_unresolved(directory), skip=skip):
            pass
    return sorted(passed_over)


def read_external_manifest(store: Store, descriptor: Descriptor) -> TreeManifest:
    """Return the verified manifest of an external tree; its blob is in the store under the descriptor's digest."""
    return read_manifest(store, descriptor.model_copy(update={"uri": blob_name(descriptor.digest)}))


def check_external(store: Store, descriptor: Descriptor, *, path: Path | None = None) -> list[Fault] | None:
    """Re-hash an external file or tree; return every fault, or None when it cannot be reached from here.

    `path` overrides the place that the descriptor's URI names, for instance after the snapshot was moved.

    Raises:
        SpecError: it is there, but this user may not read it.
        Retryable: the storage fails.
    """
    if path is None and not descriptor.uri.startswith("file:///"):
        return None
    try:
        place = absolute_unresolved(path) if path is not None else path_of_file_uri(descriptor.uri)
    except SpecError as error:
        return [Fault("malformed", descriptor.uri, "a file:// URI", descriptor.uri, str(error))]
    if path is None and not os.path.lexists(place):
        return None
    if descriptor.media_type == MEDIA_TYPE_TREE:
        try:
            manifest = read_external_manifest(store, descriptor)
        except IntegrityError as error:
            return [Fault("malformed", blob_name(descriptor.digest), descriptor.digest, "unreadable", str(error))]
        return [
            Fault(fault.kind, f"{place}/{fault.path}", fault.expected, fault.observed, fault.message)
            for fault in check_directory(place, manifest, skip=is_hidden)
        ]
    return _check_file(place, Measured(size=descriptor.size, digest=descriptor.digest))


def require_external(store: Store, descriptor: Descriptor, *, path: Path | None = None) -> None:
    """Raise IntegrityError unless an external file or tree is reachable and every byte is as described."""
    faults = check_external(store, descriptor, path=path)
    if faults is None:
        raise IntegrityError(f"{descriptor.uri} cannot be reached from here; mount it or give its path")
    if faults:
        first = faults[0]
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        raise IntegrityError(
            f"{first.path}: {first.message}: expected {first.expected}, observed {first.observed}{more}; "
            "restore the original files"
        )


def _check_file(place: Path, expected: Measured) -> list[Fault]:
    wanted = f"{expected.digest} ({expected.size} bytes)"
    try:
        with reporting(f"reading {place}"):
            try:
                observed = measure_file(place.parent, place.name)
            except FileNotFoundError:
                return [Fault("missing", str(place), wanted, "nothing", f"{place} is missing")]
    except UnsafeFile as error:
        return [Fault(error.kind, str(place), wanted, error.kind, str(error))]
    if observed == expected:
        return []
    return [Fault("changed", str(place), wanted, f"{observed.digest} ({observed.size} bytes)", f"{place} changed")]

"""Directories as artifacts: scanned strictly, published as blobs plus one manifest, materialised whole or not at all.

A tree is its files; empty directories, times, owners and modes are not part of it.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from longstraw_core.artifacts.faults import Fault
from longstraw_core.artifacts.files import (
    PARTIAL_PREFIX,
    FoundFile,
    Measured,
    UnsafeFile,
    absolute_unresolved,
    at_once,
    measure_files,
    reporting,
    storage_error,
    walk_directory,
)
from longstraw_core.artifacts.store import Store, blob_name
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import (
    MEDIA_TYPE_BYTES,
    MEDIA_TYPE_TREE,
    Descriptor,
    TreeEntry,
    TreeManifest,
    check_collisions,
    check_relative_path,
)
from longstraw_core.spec.errors import IntegrityError, SpecError

MAX_TREE_FILES = 1_000_000
"""More files than this in one directory is taken for a mistake."""


def scan_directory(
    directory: Path, *, exclude: Collection[str] = (), skip: Callable[[str], bool] | None = None
) -> list[FoundFile]:
    """List the regular files of a directory sorted by path.

    Args:
        directory: what to list.
        exclude: relative paths to leave out.
        skip: says of a relative path, also of a directory, whether it is passed over unseen.

    Raises:
        SpecError: it is missing, too large, or holds a symlink, a special file, an unsafe name or names that collide;
            the message names the file.
    """
    found: list[FoundFile] = []
    with reporting(f"reading directory {directory}"):
        try:
            for file in walk_directory(absolute_unresolved(directory), skip=skip):
                if file.path in exclude:
                    continue
                shown = f"{directory}/{file.path}".encode(errors="backslashreplace").decode()
                if file.kind != "file":
                    if file.kind == "symlink":
                        raise SpecError(f"{shown} is a symlink; a tree holds only regular files: copy with 'cp -rL'")
                    raise SpecError(f"{shown} is a special file (FIFO, socket or device); remove it")
                try:
                    check_relative_path(file.path)
                except ValueError as error:
                    raise SpecError(f"{shown} cannot be part of a tree: {error}; rename it") from error
                found.append(file)
                if len(found) > MAX_TREE_FILES:
                    raise SpecError(f"{directory} holds more than {MAX_TREE_FILES} files; name the right directory")
        except UnsafeFile as error:
            raise SpecError(f"{directory} cannot be read as a tree: {error}") from error
    found.sort(key=lambda file: file.path)
    try:
        check_collisions(file.path for file in found)
    except ValueError as error:
        raise SpecError(f"{directory}: {error}") from error
    return found


def build_tree(
    directory: Path, *, exclude: Collection[str] = (), skip: Callable[[str], bool] | None = None
) -> TreeManifest:
    """Hash every file of a directory on all cores and return its manifest; arguments and errors of `scan_directory`."""
    files = scan_directory(directory, exclude=exclude, skip=skip)
    measured = measure_files(absolute_unresolved(directory), files)
    entries: list[TreeEntry] = []
    for file in files:
        result = measured[file.path]
        if isinstance(result, UnsafeFile):
            raise result
        if isinstance(result, OSError):
            raise storage_error(result, f"reading {directory}/{file.path}") from result
        entries.append(TreeEntry(path=file.path, digest=result.digest, size=result.size))
    return TreeManifest(entries=tuple(entries))


def publish_tree(store: Store, directory: Path) -> Descriptor:
    """Store every file of a directory as a blob, then the manifest; return the manifest's descriptor.

    The manifest describes the bytes that were stored, each file read once.
    """
    return publish_manifest(store, TreeManifest(entries=publish_files(store, directory)))


def publish_files(store: Store, directory: Path) -> tuple[TreeEntry, ...]:
    """Store every file of a directory as a blob and return what a manifest says of them."""
    root = absolute_unresolved(directory)

    def publish(file: FoundFile) -> TreeEntry:
        blob = store.put_blob(root / file.path, MEDIA_TYPE_BYTES)
        return TreeEntry(path=file.path, digest=blob.digest, size=blob.size)

    return tuple(at_once(store.concurrency, publish, scan_directory(directory)))


def publish_manifest(store: Store, manifest: TreeManifest) -> Descriptor:
    """Store a tree manifest alone (its files may live elsewhere) and return its descriptor."""
    return store.put_blob(canonical_json(manifest), MEDIA_TYPE_TREE)


def parse_manifest(content: bytes, *, name: str) -> TreeManifest:
    """Read canonical manifest bytes; raises IntegrityError with `name` when they are anything else."""
    value = parse_canonical_json(content, name=name)
    try:
        return TreeManifest.model_validate(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a tree manifest: {first_complaint(error)}") from error


def read_manifest(store: Store, descriptor: Descriptor) -> TreeManifest:
    """Return the verified manifest that a tree descriptor points to."""
    if descriptor.media_type != MEDIA_TYPE_TREE:
        raise IntegrityError(f"{descriptor.uri} is {descriptor.media_type}; expected a tree ({MEDIA_TYPE_TREE})")
    return parse_manifest(store.get_bytes(descriptor), name=descriptor.uri)


def materialize_tree(store: Store, descriptor: Descriptor, destination: Path) -> TreeManifest:
    """Write a whole tree into a directory that must not exist yet; it appears only when every file is verified.

    Raises:
        SpecError: the destination exists or cannot be written.
        IntegrityError: the manifest or any file is missing or differs; nothing is left behind.
    """
    manifest = read_manifest(store, descriptor)
    with reporting(f"writing tree {destination}"):
        if os.path.lexists(destination):
            raise SpecError(f"{destination} exists already; remove it or choose another destination")
        temporary = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=destination.parent))
        try:
            for parent in sorted({(temporary / entry.path).parent for entry in manifest.entries}):
                parent.mkdir(parents=True, exist_ok=True)

            def write(entry: TreeEntry) -> None:
                blob = Descriptor(
                    uri=blob_name(entry.digest), digest=entry.digest, size=entry.size, media_type=MEDIA_TYPE_BYTES
                )
                try:
                    store.get_file(blob, temporary / entry.path)
                except IntegrityError as error:
                    raise IntegrityError(f"tree file {entry.path!r}: {error}") from error

            at_once(store.concurrency, write, manifest.entries)
            temporary.chmod(0o755)
            os.rename(temporary, destination)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return manifest


def check_directory(
    directory: Path,
    manifest: TreeManifest,
    *,
    exclude: Collection[str] = (),
    skip: Callable[[str], bool] | None = None,
    measured: dict[str, Measured] | None = None,
) -> list[Fault]:
    """Compare a directory with a manifest and return every fault: missing, extra, changed, symlink, special.

    Args:
        directory: what to compare.
        manifest: what it should hold.
        exclude: relative paths that are not looked at.
        skip: says of a relative path, also of a directory, whether it is passed over; the manifest's own never are.
        measured: receives the digests of the files that were read, so that nothing is hashed twice.

    Raises:
        SpecError: something that is there may not be read by this user: that says nothing about its bytes.
        Retryable: the storage fails.
    """
    expected = {entry.path: entry for entry in manifest.entries}
    faults: list[Fault] = []
    present: list[FoundFile] = []
    try:
        with reporting(f"reading directory {directory}"):
            try:
                walked = walk_directory(absolute_unresolved(directory), skip=_but_not_expected(skip, expected))
                found = [file for file in walked if file.path not in exclude]
            except FileNotFoundError:
                message = f"{directory} is missing, or vanished while it was read"
                return [Fault("missing", str(directory), f"{len(expected)} files", "nothing", message)]
    except UnsafeFile as error:
        return [Fault(error.kind, str(directory), "a real directory", error.kind, str(error))]
    seen: set[str] = set()
    for file in found:
        seen.add(file.path)
        shown = file.path.encode(errors="backslashreplace").decode()
        if file.kind != "file":
            wanted = expected[file.path].digest if file.path in expected else "nothing"
            faults.append(Fault(file.kind, shown, wanted, file.kind, f"{shown} is a {file.kind}, not a regular file"))
        elif file.path not in expected:
            message = f"{shown} does not belong here: it is not in the manifest"
            faults.append(Fault("extra", shown, "nothing", f"{file.size} bytes", message))
        else:
            present.append(file)
    for path, entry in expected.items():
        if path not in seen:
            faults.append(Fault("missing", path, entry.digest, "nothing", f"{path} is missing"))
    hashes = measure_files(absolute_unresolved(directory), present)
    for file in present:
        entry, result = expected[file.path], hashes[file.path]
        if isinstance(result, UnsafeFile):
            faults.append(Fault(result.kind, file.path, entry.digest, result.kind, str(result)))
            continue
        if isinstance(result, FileNotFoundError):
            faults.append(
                Fault("missing", file.path, entry.digest, "nothing", f"{file.path} vanished while it was read")
            )
            continue
        if isinstance(result, OSError):
            raise storage_error(result, f"reading {directory}/{file.path}") from result
        if measured is not None:
            measured[file.path] = result
        if result != Measured(size=entry.size, digest=entry.digest):
            faults.append(
                Fault(
                    "changed",
                    file.path,
                    f"{entry.digest} ({entry.size} bytes)",
                    f"{result.digest} ({result.size} bytes)",
                    f"{file.path} changed",
                )
            )
    return sorted(faults, key=lambda fault: fault.path)


def _but_not_expected(skip: Callable[[str], bool] | None, expected: Collection[str]) -> Callable[[str], bool] | None:
    """The same rule, which never passes over a file of the manifest or a directory that one lies in."""
    if skip is None:
        return None
    kept = set(expected)
    for path in expected:
        kept.update(str(parent) for parent in PurePosixPath(path).parents)
    return lambda path: path not in kept and skip(path)


def first_complaint(error: ValidationError) -> str:
    """The first validation error as `field: reason`."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]

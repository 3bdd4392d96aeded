"""The `file://` store: blobs and named objects as read-only files, published by a hard link that never overwrites.

Layout: `blobs/sha256/<hex>`, `runs/<run>/<transaction>/<stage>/receipt.json`, and `staging/` for what is being written.
A writer holds a lock on its staging file while it lives, so what a killed writer left behind is recognised exactly.
"""

import fcntl
import hashlib
import os
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from longstraw_core.artifacts.files import (
    CHUNK_BYTES,
    FoundFile,
    Measured,
    absolute_unresolved,
    measure_file,
    open_directory,
    open_regular,
    open_regular_at,
    reporting,
    walk_directory,
    write_fully,
)
from longstraw_core.artifacts.store import (
    AlreadyPublished,
    OpenObject,
    Pointer,
    Store,
    blob_name,
    check_object_name,
    check_pointer_name,
)
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.descriptors import Descriptor, check_relative_path
from longstraw_core.spec.errors import IntegrityError, SpecError

STAGING = "staging"


@dataclass(frozen=True, slots=True)
class _Staged:
    """A complete, durable, read-only file in the staging directory, not yet visible under its name."""

    name: str
    directory: int
    measured: Measured


class FileStore(Store):
    """A store in one local directory; safe for any number of concurrent readers and writers."""

    def __init__(self, root: Path, *, create: bool = False) -> None:
        # symlinks above the root are the administrator's; the root itself and everything below must be real
        self._root = absolute_unresolved(root)
        with reporting(f"opening store {root}"):
            try:
                if create:
                    self._root.parent.mkdir(parents=True, exist_ok=True)
                os.close(open_directory(self._root, create=create))
            except FileNotFoundError as error:
                raise SpecError(f"store {self.uri} does not exist; check the URI or run the pipeline first") from error

    @property
    def root(self) -> Path:
        """The store's directory."""
        return self._root

    @property
    def uri(self) -> str:
        """`file://` URI of the root."""
        return self._root.as_uri()

    def put_blob(self, source: bytes | Path, media_type: str) -> Descriptor:
        """Store bytes or a file under their digest; see `Store.put_blob`."""
        shown = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
        with reporting(f"storing {shown} in {self._root}"):
            if isinstance(source, bytes):
                measured = Measured(size=len(source), digest=sha256_digest(source))
                if not self._holds(measured):
                    with self._staged(source) as staged:
                        self._publish_blob(staged)
            else:
                with self._staged(source) as staged:
                    measured = staged.measured
                    self._publish_blob(staged)
        return Descriptor(
            uri=blob_name(measured.digest), digest=measured.digest, size=measured.size, media_type=media_type
        )

    def create_object(self, name: str, content: bytes, media_type: str) -> Descriptor:
        """Create a named object once; see `Store.create_object`."""
        check_object_name(name)
        wanted = Descriptor(uri=name, digest=sha256_digest(content), size=len(content), media_type=media_type)
        with reporting(f"creating {self._root}/{name}"):
            with self._staged(content) as staged:
                created = self._link(staged, name)
            if not created:
                published = self.describe_object(name, media_type)
                if published.digest != wanted.digest:
                    raise AlreadyPublished(name, published, wanted)
        return wanted

    @contextmanager
    def open_object(self, name: str) -> Generator[OpenObject, None, None]:
        """Open a stored file without following symlinks; see `Store.open_object`."""
        try:
            check_relative_path(name)
        except ValueError as error:
            raise SpecError(f"object name refused: {error}") from error
        with open_regular(self._root, name) as opened:
            yield OpenObject(size=os.fstat(opened.fileno()).st_size, stream=opened)

    def walk(self, prefix: str = "") -> Iterator[FoundFile]:
        """Yield everything under a prefix; see `Store.walk`."""
        if prefix and not prefix.endswith("/"):
            raise SpecError(f"prefix {prefix!r} must be empty or end with '/'")
        with reporting(f"listing {self._root}/{prefix}"):
            try:
                os.close(open_directory(self._root, prefix.rstrip("/")))
            except FileNotFoundError:
                return
            yield from walk_directory(self._root, prefix.rstrip("/"))

    def clear_stale_staging(self) -> int:
        """Delete the staging files whose writers are gone: those on which no live process holds a lock."""
        cleared = 0
        with reporting(f"clearing {self._root}/{STAGING}"):
            try:
                directory = open_directory(self._root, STAGING)
            except FileNotFoundError:
                return 0
            try:
                for name in os.listdir(directory):
                    with suppress(FileNotFoundError):
                        cleared += self._clear_if_stale(name, directory)
            finally:
                os.close(directory)
        return cleared

    def delete_object(self, name: str) -> None:
        """Delete a file; see `Store.delete_object`."""
        parent, _, last = check_relative_path(name).rpartition("/")
        with reporting(f"deleting {self._root}/{name}"), suppress(FileNotFoundError):
            directory = open_directory(self._root, parent)
            try:
                os.unlink(last, dir_fd=directory)
            finally:
                os.close(directory)

    def read_pointer(self, name: str) -> Pointer | None:
        """Read a pointer, with its digest as version; see `Store.read_pointer`."""
        check_pointer_name(name)
        with reporting(f"reading {self._root}/{name}"):
            try:
                with open_regular(self._root, name) as opened:
                    content = opened.read()
            except FileNotFoundError:
                return None
        return Pointer(content=content, version=sha256_digest(content))

    def replace_pointer(self, name: str, content: bytes, expected: Pointer | None) -> bool:
        """Compare and swap under a lock on the pointer's directory; see `Store.replace_pointer`."""
        check_pointer_name(name)
        parent, _, last = name.rpartition("/")
        with reporting(f"moving {self._root}/{name}"), self._staged(content) as staged:
            target = open_directory(self._root, parent, create=True)
            try:
                fcntl.flock(target, fcntl.LOCK_EX)  # released with the descriptor, also when this process dies
                if self.read_pointer(name) != expected:
                    return False
                os.rename(staged.name, last, src_dir_fd=staged.directory, dst_dir_fd=target)
                os.fsync(target)
            finally:
                os.close(target)
        return True

    def _clear_if_stale(self, name: str, directory: int) -> int:
        opened = open_regular_at(name, directory, f"{self._root}/{STAGING}/{name}")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=directory)
        except BlockingIOError:
            return 0  # its writer lives
        finally:
            os.close(opened)
        return 1

    def _holds(self, measured: Measured) -> bool:
        """Whether the blob is stored; re-hashes it, so a corrupt one is an error and never accepted."""
        name = blob_name(measured.digest)
        try:
            observed = measure_file(self._root, name)
        except FileNotFoundError:
            return False
        if observed != measured:
            raise IntegrityError(
                f"{self._root}/{name} is corrupt: expected {measured.digest} ({measured.size} bytes), observed "
                f"{observed.digest} ({observed.size} bytes); delete the file and run again"
            )
        return True

    def _publish_blob(self, staged: _Staged) -> None:
        if not self._link(staged, blob_name(staged.measured.digest)) and not self._holds(staged.measured):
            raise IntegrityError(f"{self._root}/{blob_name(staged.measured.digest)} vanished while it was being stored")

    def _link(self, staged: _Staged, name: str) -> bool:
        """Make a staged file visible under its final name, durably; False when the name is taken."""
        parent, _, last = name.rpartition("/")
        target = open_directory(self._root, parent, create=True)
        try:
            os.link(staged.name, last, src_dir_fd=staged.directory, dst_dir_fd=target, follow_symlinks=False)
        except FileExistsError:
            return False
        else:
            os.fsync(target)
            return True
        finally:
            os.close(target)

    @contextmanager
    def _staged(self, source: bytes | Path) -> Generator[_Staged, None, None]:
        """Write `source` to a locked staging file, hashing on the way; the staging file is gone afterwards."""
        directory = open_directory(self._root, STAGING, create=True)
        opened = -1
        name = ""
        try:
            name, opened = _create_locked(directory)
            if isinstance(source, bytes):
                write_fully(opened, source)
                measured = Measured(size=len(source), digest=sha256_digest(source))
            else:
                measured = _copy_and_hash(source, opened)
            os.fchmod(opened, 0o444)
            os.fsync(opened)
            yield _Staged(name=name, directory=directory, measured=measured)
        finally:
            if opened >= 0:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
                os.close(opened)
            os.close(directory)


def _create_locked(directory: int) -> tuple[str, int]:
    while True:
        name = uuid.uuid4().hex
        opened = os.open(
            name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
        )
        fcntl.flock(opened, fcntl.LOCK_EX)
        if os.fstat(opened).st_nlink:
            return name, opened
        os.close(opened)  # cleared as stale between creation and locking: begin again


def _copy_and_hash(source: Path, target: int) -> Measured:
    opened = open_regular_at(str(source), None, str(source))
    try:
        digest = hashlib.sha256()
        size = 0
        while chunk := os.read(opened, CHUNK_BYTES):
            digest.update(chunk)
            write_fully(target, chunk)
            size += len(chunk)
        return Measured(size=size, digest="sha256:" + digest.hexdigest())
    finally:
        os.close(opened)

"""The interface of every artifact store: immutable blobs by digest, create-only named objects, verified reads only.

URIs of descriptors are relative to the store: `blobs/sha256/<hex>` for a blob, `runs/…` for a named object. A store
directory or bucket prefix can therefore be moved or copied and still verifies; the store itself is opened by its own
URI. Only external inputs (`external:*`) carry absolute `file://` URIs.
"""

import hashlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote

from longstraw_core.artifacts.files import (
    CHUNK_BYTES,
    PARTIAL_PREFIX,
    FoundFile,
    Measured,
    reporting,
    storage_error,
    worker_count,
)
from longstraw_core.artifacts.signing import NO_KEYS, ReceiptKeys, keys_from_environment
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.descriptors import Descriptor, check_relative_path
from longstraw_core.spec.errors import IntegrityError, Retryable, SpecError

BLOB_PREFIX = "blobs/sha256/"
POLICY_PREFIX = "policies/"
RESERVED_PREFIXES = ("blobs/", "staging/", POLICY_PREFIX)
"""Names that only the store itself writes."""

_POINTER_NAME = re.compile(r"policies/[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?/current\.json")

MAX_IN_MEMORY_BYTES = 1 << 30
"""`get_bytes` refuses larger objects: stream them to a file instead."""


class AlreadyPublished(Retryable):
    """Another writer created the named object first, with other bytes; running again reuses what it published."""

    def __init__(self, name: str, published: Descriptor, refused: Descriptor) -> None:
        super().__init__(
            f"{name} was already published as {published.digest}; this writer's {refused.digest} was not stored: "
            "run the same command again to reuse what was published"
        )
        self.name = name
        self.published = published
        self.refused = refused


class ByteStream(Protocol):
    """What of a binary file is used here."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, none at the end."""
        ...


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object opened for reading: its length as the store reports it and its unverified bytes."""

    size: int
    stream: ByteStream


@dataclass(frozen=True, slots=True)
class Pointer:
    """The one kind of object that changes: its bytes and an opaque version that `replace_pointer` compares."""

    content: bytes
    version: str


def blob_name(digest: str) -> str:
    """Name of the blob with this `sha256:<hex>` digest."""
    return BLOB_PREFIX + digest.removeprefix("sha256:")


def check_object_name(name: str) -> str:
    """Return `name` if a caller may create an object under it; raise SpecError otherwise."""
    try:
        check_relative_path(name)
    except ValueError as error:
        raise SpecError(f"object name refused: {error}") from error
    if f"{name}/".startswith(RESERVED_PREFIXES):
        raise SpecError(f"object name {name!r} is reserved for the store itself; use a name under 'runs/'")
    return name


def check_pointer_name(name: str) -> str:
    """Return `name` if it is `policies/<name>/current.json`; raise SpecError otherwise."""
    if _POINTER_NAME.fullmatch(name) is None:
        raise SpecError(f"pointer name {name!r} must be policies/<lower-case letters, digits, hyphens>/current.json")
    return name


class Store(ABC):
    """Where artifacts are kept. Implementations provide storage; verification lives here, once."""

    keys: ReceiptKeys = NO_KEYS
    """With what receipts are signed and checked; `open_store` takes it from the environment."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The URI that `open_store` takes to open this store again."""

    @abstractmethod
    def put_blob(self, source: bytes | Path, media_type: str) -> Descriptor:
        """Store bytes, or a local regular file, under their own digest; return the descriptor.

        Storing what exists already checks the stored blob: re-hashed, or by the SHA-256 that its server states for it.

        Raises:
            IntegrityError: the blob exists with other bytes than its name says.
            Retryable: no space, or the storage failed for the moment.
            SpecError: the source is missing, not a regular file, or access is denied.
        """

    @abstractmethod
    def create_object(self, name: str, content: bytes, media_type: str) -> Descriptor:
        """Create the named object if it is absent; creating it again with the same bytes succeeds.

        Raises:
            AlreadyPublished: the object exists with other bytes. Exactly one of several writers wins.
            SpecError: the name is unsafe or reserved.
        """

    @abstractmethod
    def open_object(self, name: str) -> AbstractContextManager[OpenObject]:
        """Open an object for reading without verifying it; use `get_bytes` or `get_file` unless you hash yourself.

        Raises:
            FileNotFoundError: there is no object of this name.
            UnsafeFile: a part of its path is a symlink, or it is not a regular file.
        """

    @abstractmethod
    def walk(self, prefix: str = "") -> Iterator[FoundFile]:
        """Yield everything stored under a prefix (empty, or ending in `/`), including what does not belong there."""

    @abstractmethod
    def clear_stale_staging(self) -> int:
        """Delete what writers that no longer live left half-written; return how many files that were."""

    @abstractmethod
    def delete_object(self, name: str) -> None:
        """Delete an object that nothing needs any more; one that is gone already is no error."""

    @abstractmethod
    def read_pointer(self, name: str) -> Pointer | None:
        """Read `policies/<name>/current.json`; None when it was never written."""

    @abstractmethod
    def replace_pointer(self, name: str, content: bytes, expected: Pointer | None) -> bool:
        """Write a pointer if it still is what `read_pointer` returned (None: absent); False when it is not.

        Of several writers that expect the same, exactly one succeeds.
        """

    @property
    def concurrency(self) -> int:
        """How many objects are read or written at once to keep this store busy."""
        return worker_count()

    def exists(self, name: str) -> bool:
        """Whether an object of this name can be opened; says nothing about its bytes."""
        with reporting(f"looking up {self.uri}/{name}"):
            try:
                with self.open_object(name):
                    return True
            except FileNotFoundError:
                return False

    def list_names(self, prefix: str = "") -> list[str]:
        """Sorted names of all regular objects under a prefix (empty, or ending in `/`)."""
        return sorted(found.path for found in self.walk(prefix) if found.kind == "file")

    def measure(self, name: str) -> Measured:
        """Hash a stored object; raises FileNotFoundError or UnsafeFile like `open_object`."""
        digest = hashlib.sha256()
        size = 0
        with self.open_object(name) as opened:
            while chunk := opened.stream.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        return Measured(size=size, digest="sha256:" + digest.hexdigest())

    def describe_object(self, name: str, media_type: str) -> Descriptor:
        """Descriptor of a named object as it is stored now.

        Raises:
            IntegrityError: it is missing or not a regular file.
        """
        with reporting(f"reading {self.uri}/{name}"):
            try:
                measured = self.measure(name)
            except FileNotFoundError as error:
                raise IntegrityError(f"{name} is missing from {self.uri}") from error
        return Descriptor(uri=name, digest=measured.digest, size=measured.size, media_type=media_type)

    def get_bytes(self, descriptor: Descriptor) -> bytes:
        """Return the verified bytes of a small object.

        Raises:
            IntegrityError: the object is missing, or its length or digest differs from the descriptor.
        """
        if descriptor.size > MAX_IN_MEMORY_BYTES:
            raise SpecError(f"{descriptor.uri} has {descriptor.size} bytes; read it with get_file, not into memory")
        content = b"".join(self._verified_chunks(descriptor))
        if sha256_digest(content) != descriptor.digest:
            raise _digest_differs(descriptor, sha256_digest(content))
        return content

    def get_file(self, descriptor: Descriptor, destination: Path) -> None:
        """Write the verified bytes of an object to a file that must not exist yet; it appears only when verified.

        Raises:
            IntegrityError: the object is missing, or its length or digest differs from the descriptor.
            SpecError: the destination exists already or cannot be written.
        """
        with reporting(f"writing {destination}"):
            if os.path.lexists(destination):
                raise SpecError(f"{destination} exists already; remove it or choose another destination")
            opened, temporary = tempfile.mkstemp(prefix=PARTIAL_PREFIX, dir=destination.parent)
            try:
                digest = hashlib.sha256()
                with os.fdopen(opened, "wb", buffering=0) as file:
                    for chunk in self._verified_chunks(descriptor):
                        digest.update(chunk)
                        _write_all(file, chunk)
                observed = "sha256:" + digest.hexdigest()
                if observed != descriptor.digest:
                    raise _digest_differs(descriptor, observed)
                os.chmod(temporary, 0o644)
                os.rename(temporary, destination)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise

    def _verified_chunks(self, descriptor: Descriptor) -> Iterator[bytes]:
        """Yield an object's bytes; the length is checked before and while reading, the digest is the caller's part."""
        name = self._name_of(descriptor)
        try:
            with self.open_object(name) as opened:
                if opened.size != descriptor.size:
                    raise _length_differs(descriptor, opened.size)
                size = 0
                while chunk := opened.stream.read(CHUNK_BYTES):
                    size += len(chunk)
                    if size > descriptor.size:
                        raise _length_differs(descriptor, size)
                    yield chunk
                if size != descriptor.size:
                    raise _length_differs(descriptor, size)
        except FileNotFoundError as error:
            raise IntegrityError(f"{name} is missing from {self.uri}; expected {descriptor.digest}") from error
        except OSError as error:
            raise storage_error(error, f"reading {self.uri}/{name}") from error

    def _name_of(self, descriptor: Descriptor) -> str:
        try:
            name = check_relative_path(descriptor.uri)
        except ValueError as error:
            raise IntegrityError(f"{descriptor.uri} is not an object of {self.uri}: {error}") from error
        if name.startswith("blobs/") and name != blob_name(descriptor.digest):
            raise IntegrityError(f"descriptor of {name} has digest {descriptor.digest}; name and digest must agree")
        return name


def _write_all(file: BinaryIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def _length_differs(descriptor: Descriptor, observed: int) -> IntegrityError:
    return IntegrityError(f"{descriptor.uri}: expected {descriptor.size} bytes, observed {observed}; do not use it")


def _digest_differs(descriptor: Descriptor, observed: str) -> IntegrityError:
    return IntegrityError(f"{descriptor.uri}: expected {descriptor.digest}, observed {observed}; do not use it")


def path_of_file_uri(uri: str, *, base: Path | None = None) -> Path:
    """Return the path of a `file://` URI; `file://./…` and `file://../…` are relative to `base` (default: here).

    Raises:
        SpecError: another scheme, or a host name where a path should begin.
    """
    if not uri.startswith("file://"):
        raise SpecError(f"{uri!r} is not a file:// URI; write file:///absolute/path or file://./relative/path")
    text = unquote(uri.removeprefix("file://"))
    if "\0" in text:
        raise SpecError(f"{uri!r} contains a NUL byte")
    if not text.startswith(("/", "./", "../")) and text not in (".", ".."):
        raise SpecError(f"{uri!r} names a host; write file:///absolute/path or file://./relative/path")
    return Path(os.path.normpath((base or Path.cwd()) / text))


def open_store(uri: str, *, base: Path | None = None, create: bool = False) -> Store:
    """Open the store at a `file://` or `s3://` URI; `base` is where relative `file://./…` URIs start.

    Where an S3 server is and how to sign in, and the keys that sign and check receipts, come from the environment.

    Raises:
        SpecError: unknown scheme, the store does not exist and `create` is false, or the server refuses.
        IntegrityError: the store's root is a symlink.
        Retryable: the server cannot be reached.
    """
    if uri.startswith("file://"):
        from longstraw_core.artifacts.file_store import FileStore

        store: Store = FileStore(path_of_file_uri(uri, base=base), create=create)
    elif uri.startswith("s3://"):
        from longstraw_core.artifacts.s3_store import S3Store

        store = S3Store(uri, create=create)
    else:
        scheme = uri.partition("://")[0] if "://" in uri else ""
        raise SpecError(f"the store's URI has an unknown scheme {scheme[:20]!r}; allowed: file://, s3://")
    store.keys = keys_from_environment()
    return store

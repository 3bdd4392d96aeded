"""Reads objects for a verification and decides what a failure means: a fault of the artifact, or of the storage.

What is missing, is no regular file or has other bytes than published is a fault, and the walk goes on. A storage that
does not answer, or does not let this user read, says nothing about the bytes: its error ends the walk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longstraw_core.artifacts.faults import Fault, FaultKind, VerifyReport
from longstraw_core.artifacts.files import FoundFile, Measured, UnsafeFile, at_once, storage_error
from longstraw_core.artifacts.store import BLOB_PREFIX, MAX_IN_MEMORY_BYTES, Store
from longstraw_core.spec.descriptors import Descriptor
from longstraw_core.spec.errors import IntegrityError

MAX_OBJECT_BYTES = 64 << 20
"""A longer receipt, signature or pointer is read only this far, and so is malformed."""


@dataclass(slots=True)
class ObjectReader:
    """One verification's view of a store; every method may raise the storage's SpecError or Retryable."""

    store: Store
    measured: Mapping[str, Measured]
    """Digests that the caller computed from these very files just before, by object name."""
    report: VerifyReport = field(default_factory=VerifyReport)
    present: dict[str, Measured] = field(default_factory=dict[str, Measured])
    """Blobs that were hashed."""
    reported: set[str] = field(default_factory=set[str])
    """Objects that cannot be hashed and about which a fault says why."""
    unread: list[str] = field(default_factory=list[str])
    """Manifests and pointers that could not be read, so that what they lead to is unknown."""

    def fault(self, kind: FaultKind, path: str, expected: str, observed: str, message: str) -> None:
        """Add a fault to the report."""
        self.report.faults.append(Fault(kind, path, expected, observed, message))

    def found(self, prefix: str) -> list[FoundFile]:
        """Everything under a prefix, sorted by path."""
        try:
            return sorted(self.store.walk(prefix), key=lambda found: found.path)
        except UnsafeFile as error:
            self.not_an_object(prefix or self.store.uri, "a directory", error)
            return []

    def read(self, name: str, expected: str) -> bytes | None:
        """Unverified bytes of a small object; None, and a fault, when there is no such regular file."""
        try:
            with self.store.open_object(name) as opened:
                return opened.stream.read(MAX_OBJECT_BYTES)
        except FileNotFoundError:
            self.fault("missing", name, expected, "nothing", f"{name} vanished while the store was read")
        except IntegrityError as error:
            self.not_an_object(name, expected, error)
        except OSError as error:
            raise storage_error(error, f"reading {self.store.uri}/{name}") from error
        return None

    def content(self, descriptor: Descriptor) -> bytes | None:
        """Verified bytes of a manifest; None when they are missing or corrupt, which hashing reports by itself."""
        if descriptor.size > MAX_IN_MEMORY_BYTES:
            message = f"{descriptor.uri}: {descriptor.size} bytes are more than a manifest has"
            self.fault("malformed", descriptor.uri, "a manifest", f"{descriptor.size} bytes", message)
            self.unread.append(descriptor.uri)
            return None
        try:
            return self.store.get_bytes(descriptor)
        except IntegrityError:
            self.unread.append(descriptor.uri)
            return None

    def hash(self, names: list[str], sizes: Mapping[str, int]) -> None:
        """Hash blobs on all cores; a blob whose bytes are not its name is a fault. `sizes` are what is expected."""
        for name, result in zip(names, at_once(self.store.concurrency, self._measure, names), strict=True):
            if isinstance(result, FileNotFoundError):
                continue  # whoever needs it is named by the caller
            expected = "sha256:" + name.removeprefix(BLOB_PREFIX)
            if isinstance(result, IntegrityError):
                self.not_an_object(name, expected, result)
                continue
            self.present[name] = result
            self.report.blobs += 1
            self.report.bytes += result.size
            if result.digest != expected:
                observed = f"{result.digest} ({result.size} bytes)"
                wanted = f"{expected} ({sizes[name]} bytes)" if name in sizes else expected
                self.fault("changed", name, wanted, observed, "the blob's bytes are not what its name says")

    def not_an_object(self, name: str, expected: str, error: IntegrityError) -> None:
        """Report, once, what is no regular file, or was replaced while it was read."""
        if name in self.reported:
            return
        self.reported.add(name)
        kind: FaultKind = error.kind if isinstance(error, UnsafeFile) else "changed"
        self.fault(kind, name, expected, kind, str(error))

    def not_a_file(self, found: FoundFile) -> None:
        """Report a symlink or special file that was found."""
        self.reported.add(found.path)
        shown = shown_path(found.path)
        self.fault(found.kind, shown, "a regular file or nothing", found.kind, f"{shown} is a {found.kind}: remove it")

    def _measure(self, name: str) -> Measured | FileNotFoundError | IntegrityError:
        known = self.measured.get(name)
        if known is not None:
            return known
        try:
            return self.store.measure(name)
        except (FileNotFoundError, IntegrityError) as error:
            return error
        except OSError as error:
            raise storage_error(error, f"reading {self.store.uri}/{name}") from error


def shown_path(path: str) -> str:
    """A path that may not be valid Unicode, for messages."""
    return path.encode(errors="backslashreplace").decode()

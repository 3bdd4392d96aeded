"""Reading and writing local files safely: no symlink is followed, nothing half-written is visible; knows no store."""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from longstraw_core.spec.errors import IntegrityError, LongStrawError, Retryable, SpecError

CHUNK_BYTES = 1 << 20
HASH_BUFFER_BYTES = 256 << 10
"""Fits a core's own cache, so that what was just read is hashed from there."""

PARTIAL_PREFIX = ".longstraw-partial-"
"""Start of the name of every temporary file or directory made next to a destination."""

_BATCH_FILES = 256
_BATCH_BYTES = 32 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")

FileKind = Literal["file", "directory", "symlink", "special"]


class UnsafeFile(IntegrityError):
    """A path that must be a regular file, reached through real directories only, is something else."""

    def __init__(self, path: str, kind: FileKind) -> None:
        noun = {"special": "special file (FIFO, socket or device)"}.get(kind, kind)
        super().__init__(f"{path} is a {noun}; only regular files in real directories are read: replace it by the file")
        self.path = path
        self.kind: FileKind = kind


@dataclass(frozen=True, slots=True)
class Measured:
    """Size and digest of bytes that were actually read."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One thing found while walking a directory: its path relative to the root, its kind, its size and its time."""

    path: str
    kind: FileKind
    size: int
    modified: float = 0.0
    """When it was last written, in seconds since 1970 by the clock of whoever stores it."""


def worker_count() -> int:
    """Number of threads that hash or copy at once: the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def storage_error(error: OSError, action: str) -> LongStrawError:
    """Turn an operating-system error into the type that says what the caller can do about it."""
    reason = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return Retryable(f"{action}: {reason}; free some space or use another file system, then run again")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return SpecError(f"{action}: {reason}; give this user access or choose another place")
        case errno.EFBIG:
            return SpecError(f"{action}: {reason}; raise the limit on file sizes or use another file system")
        case errno.ENAMETOOLONG:
            return SpecError(f"{action}: {reason}; use shorter names")
        case errno.EOPNOTSUPP | errno.EXDEV | errno.EMLINK:
            return SpecError(f"{action}: {reason}; the store needs one file system with hard links and locks")
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR:
            return SpecError(f"{action}: {reason}; check the path")
        case _:
            return Retryable(f"{action}: {reason}; run the same command again")


def kind_of_mode(mode: int) -> FileKind:
    """Classify an `st_mode`."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "special"


def _kind_at(name: str, directory: int | None) -> FileKind:
    return kind_of_mode(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


def open_directory(root: Path, relative: str = "", *, create: bool = False) -> int:
    """Open `root/relative` part by part without following symlinks below the parents of `root`; return the descriptor.

    Raises:
        FileNotFoundError: a part does not exist and `create` is false.
        UnsafeFile: a part is not a real directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    current = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    walked = str(root.parent)
    try:
        for part in (root.name, *(relative.split("/") if relative else ())):
            walked = f"{walked}/{part}"
            if create:
                with suppress(FileExistsError):  # another writer may make it first; it is opened like any other
                    os.mkdir(part, dir_fd=current)
                    os.fsync(current)
            try:
                following = os.open(part, flags, dir_fd=current)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise UnsafeFile(walked, _kind_at(part, current)) from error
                raise
            os.close(current)
            current = following
    except BaseException:
        os.close(current)
        raise
    return current


def open_regular_at(name: str, directory: int | None, shown: str) -> int:
    """Open the regular file `name` in an open directory for reading; `shown` is its path for messages.

    Raises:
        FileNotFoundError: there is no such file.
        UnsafeFile: it is a symlink, a directory or a special file.
    """
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsafeFile(shown, _kind_at(name, directory)) from error
        raise
    kind = kind_of_mode(os.fstat(opened).st_mode)
    if kind != "file":
        os.close(opened)
        raise UnsafeFile(shown, kind)
    return opened


def open_regular(root: Path, relative: str) -> BinaryIO:
    """Open the regular file `root/relative` for reading; no part below `root` may be a symlink."""
    parent, _, name = relative.rpartition("/")
    directory = open_directory(root, parent)
    try:
        return os.fdopen(open_regular_at(name, directory, f"{root}/{relative}"), "rb", buffering=0)
    finally:
        os.close(directory)


def hash_open_file(opened: int, buffer: bytearray | None = None) -> Measured:
    """Read an open file to its end and return its size and digest; `buffer` is used and overwritten when given."""
    view = memoryview(bytearray(HASH_BUFFER_BYTES) if buffer is None else buffer)
    digest = hashlib.sha256()
    size = 0
    while count := os.readv(opened, [view]):
        digest.update(view[:count])
        size += count
    return Measured(size=size, digest="sha256:" + digest.hexdigest())


def measure_file(root: Path, relative: str) -> Measured:
    """Hash `root/relative` without following symlinks."""
    with open_regular(root, relative) as opened:
        return hash_open_file(opened.fileno())


def write_fully(opened: int, content: bytes) -> None:
    """Write all bytes; the system call may take several turns."""
    view = memoryview(content)
    while view:
        view = view[os.write(opened, view) :]


def sync_directory(directory: Path | int) -> None:
    """Make a directory's entries durable."""
    if isinstance(directory, int):
        os.fsync(directory)
        return
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def at_once(threads: int, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results in order, computed by several threads; the first error ends it, and what had not begun is not begun."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def reporting(action: str) -> Generator[None, None, None]:
    """Turn every `OSError` inside the block into a typed error that starts with `action`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, action) from error


def walk_directory(root: Path, relative: str = "", *, skip: Callable[[str], bool] | None = None) -> Iterator[FoundFile]:
    """Yield everything below `root/relative` except real directories, in no particular order; follows no symlink.

    Paths are relative to `root`. Names that are not UTF-8 come with surrogate escapes. What `skip` says yes to is
    passed over, a directory with all that is in it.
    """
    waiting = [relative]
    while waiting:
        current = waiting.pop()
        directory = open_directory(root, current)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    path = f"{current}/{entry.name}" if current else entry.name
                    if skip is not None and skip(path):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # a writer finished with it between listing and looking
                    kind = kind_of_mode(status.st_mode)
                    if kind == "directory":
                        waiting.append(path)
                    else:
                        yield FoundFile(path=path, kind=kind, size=status.st_size, modified=status.st_mtime)
        finally:
            os.close(directory)


def absolute_unresolved(path: Path) -> Path:
    """Absolute form with resolved parents; the last part stays, so that a symlink there is refused, not followed."""
    absolute = Path(os.path.abspath(path))
    return absolute.parent.resolve() / absolute.name


def clear_partials(directory: Path) -> int:
    """Delete what killed processes left under temporary names anywhere below a directory; return how many things.

    The caller makes sure that nobody writes there now.
    """
    cleared = 0
    with reporting(f"clearing {directory}"):
        for parent, directories, files in os.walk(directory):
            for name in [name for name in directories if name.startswith(PARTIAL_PREFIX)]:
                directories.remove(name)
                path = Path(parent, name)
                if not path.is_symlink():
                    shutil.rmtree(path)
                    cleared += 1
            for name in files:
                if name.startswith(PARTIAL_PREFIX):
                    Path(parent, name).unlink()
                    cleared += 1
    return cleared


def measure_files(root: Path, files: Iterable[FoundFile]) -> dict[str, Measured | OSError | UnsafeFile]:
    """Hash many files on all cores; a file that cannot be read maps to its error instead of a measurement."""
    by_parent: dict[str, list[FoundFile]] = {}
    for file in files:
        by_parent.setdefault(file.path.rpartition("/")[0], []).append(file)
    batches: list[tuple[str, list[FoundFile]]] = []
    for parent, members in by_parent.items():
        batch: list[FoundFile] = []
        pending = 0
        for file in members:
            batch.append(file)
            pending += file.size
            if len(batch) >= _BATCH_FILES or pending >= _BATCH_BYTES:
                batches.append((parent, batch))
                batch, pending = [], 0
        if batch:
            batches.append((parent, batch))
    # the largest first, so that no core is left alone with a big file at the end
    batches.sort(key=lambda item: -sum(file.size for file in item[1]))
    measured: dict[str, Measured | OSError | UnsafeFile] = {}
    with ThreadPoolExecutor(worker_count()) as pool:
        for future in [pool.submit(_measure_batch, root, parent, batch) for parent, batch in batches]:
            measured.update(future.result())
    return measured


def _measure_batch(root: Path, parent: str, files: Sequence[FoundFile]) -> dict[str, Measured | OSError | UnsafeFile]:
    results: dict[str, Measured | OSError | UnsafeFile] = {}
    buffer = bytearray(HASH_BUFFER_BYTES)
    try:
        directory = open_directory(root, parent)
    except (OSError, UnsafeFile) as error:
        return {file.path: error for file in files}
    try:
        for file in files:
            try:
                opened = open_regular_at(file.path.rpartition("/")[2], directory, f"{root}/{file.path}")
                try:
                    results[file.path] = hash_open_file(opened, buffer)
                finally:
                    os.close(opened)
            except (OSError, UnsafeFile) as error:
                results[file.path] = error
    finally:
        os.close(directory)
    return results

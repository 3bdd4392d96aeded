"""Seal a finished run directory with an index that certifies itself, and verify every byte of it later.

The index is `complete.sha256-<hex>.json` at the top of the directory: a canonical tree manifest of every file except
itself and `.lock`, whose name holds the digest of its own bytes. No index, no complete run.
"""

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from longstraw_core.artifacts.faults import Fault, VerifyReport
from longstraw_core.artifacts.file_store import FileStore
from longstraw_core.artifacts.files import (
    PARTIAL_PREFIX,
    Measured,
    UnsafeFile,
    absolute_unresolved,
    clear_partials,
    kind_of_mode,
    open_directory,
    open_regular,
    reporting,
    sync_directory,
)
from longstraw_core.artifacts.store import Store, open_store
from longstraw_core.artifacts.trees import build_tree, check_directory, parse_manifest
from longstraw_core.artifacts.verify import verify_store
from longstraw_core.spec.canonical import canonical_json, sha256_digest
from longstraw_core.spec.descriptors import TreeManifest
from longstraw_core.spec.errors import IntegrityError, SpecError

LOCK_NAME = ".lock"
STORE_DIRECTORY = "store"
INDEX_NAME = re.compile(r"complete\.sha256-([0-9a-f]{64})\.json")


def seal_directory(workdir: Path) -> Path:
    """Write the index of a finished run directory, replacing an older one, and return its path.

    The caller holds the directory's lock and nobody writes into it any more; what killed writers left in it and in
    `<workdir>/store` is cleared first. A kill at any moment leaves the directory sealed as before, unsealed, or
    sealed anew; never under an index that misses a file.

    Raises:
        SpecError: a file is a symlink, a special file or has an unsafe name, or the directory is missing.
    """
    if os.path.lexists(workdir / STORE_DIRECTORY):
        FileStore(workdir / STORE_DIRECTORY).clear_stale_staging()
    with reporting(f"sealing {workdir}"):
        old = _index_names(workdir)
        clear_partials(workdir)
        content = canonical_json(build_tree(workdir, exclude={LOCK_NAME, *old}))
        index = workdir / f"complete.sha256-{sha256_digest(content).removeprefix('sha256:')}.json"
        opened, temporary = tempfile.mkstemp(prefix=PARTIAL_PREFIX, dir=workdir)
        try:
            with os.fdopen(opened, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), 0o444)
                os.fsync(file.fileno())
            for name in old:
                (workdir / name).unlink()
            os.rename(temporary, index)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        sync_directory(workdir)
    return index


def unseal_directory(workdir: Path) -> None:
    """Remove the index before a finished run directory is written to again; no index is no error."""
    with reporting(f"unsealing {workdir}"):
        for name in _index_names(workdir):
            (workdir / name).unlink()
        sync_directory(workdir)


def verify_directory(workdir: Path, *, external: bool = True) -> VerifyReport:
    """Verify a sealed run directory: its index, every file, and the receipts and blobs in `<workdir>/store`.

    Raises:
        SpecError: there is no such directory, or something in it may not be read by this user.
        Retryable: the storage fails.
    """
    report = VerifyReport()
    with reporting(f"verifying {workdir}"):
        if not os.path.lexists(workdir):
            raise SpecError(f"{workdir} does not exist; name the work directory of a run")
        if os.path.isfile(workdir) and not os.path.islink(workdir):
            raise SpecError(f"{workdir} is a file; name the work directory of a run")
        try:
            os.close(open_directory(absolute_unresolved(workdir)))
        except UnsafeFile as error:
            report.faults.append(Fault(error.kind, str(workdir), "a real directory", error.kind, str(error)))
            return report
        indexes = _index_names(workdir)
    report.faults.extend(_lock_faults(workdir))
    manifest = _read_index(workdir, indexes, report)
    measured: dict[str, Measured] = {}
    if manifest is not None:
        faults = check_directory(workdir, manifest, exclude={LOCK_NAME, *indexes}, measured=measured)
        report.faults.extend(faults)
        report.bytes = sum(result.size for result in measured.values())
    if os.path.lexists(workdir / STORE_DIRECTORY):
        prefix = f"{STORE_DIRECTORY}/"
        known = {name.removeprefix(prefix): result for name, result in measured.items() if name.startswith(prefix)}
        try:
            store_report = verify_store(_open_own_store(workdir), external=external, measured=known)
        except UnsafeFile as error:
            report.faults.append(Fault(error.kind, STORE_DIRECTORY, "a store", error.kind, str(error)))
        else:
            report.include(store_report, prefix=prefix)
            if manifest is None:
                report.bytes = store_report.bytes
    elif manifest is None:
        report.faults.append(Fault("missing", STORE_DIRECTORY, "a store", "nothing", "the run's store is missing"))
    return report


def _lock_faults(workdir: Path) -> list[Fault]:
    """The lock is the one file outside the index: it may be missing, but must be an empty regular file."""
    try:
        state = os.lstat(workdir / LOCK_NAME)
    except FileNotFoundError:
        return []
    kind = kind_of_mode(state.st_mode)
    if kind == "file" and state.st_size == 0:
        return []
    observed = f"{state.st_size} bytes" if kind == "file" else kind
    return [
        Fault(
            "changed" if kind == "file" else kind,
            LOCK_NAME,
            "an empty file",
            observed,
            f"{LOCK_NAME} was tampered with",
        )
    ]


def _open_own_store(workdir: Path) -> Store:
    """The run's own store, with the keys that the environment names."""
    return open_store(absolute_unresolved(workdir / STORE_DIRECTORY).as_uri())


def _read_index(workdir: Path, indexes: list[str], report: VerifyReport) -> TreeManifest | None:
    if len(indexes) != 1:
        if indexes:
            message = f"{len(indexes)} indexes: {', '.join(indexes)}; a sealed run has exactly one"
        else:
            message = (
                "run is incomplete: there is no complete.sha256-<hex>.json; run the same command again to finish it"
            )
        report.faults.append(Fault("incomplete", str(workdir), "one index", f"{len(indexes)} indexes", message))
        return None
    name = indexes[0]
    try:
        with reporting(f"reading {name}"), open_regular(absolute_unresolved(workdir), name) as opened:
            content = opened.read()
        expected = "sha256:" + name.removeprefix("complete.sha256-").removesuffix(".json")
        observed = sha256_digest(content)
        if observed != expected:
            message = f"{name} was edited: its name is not the digest of its bytes"
            report.faults.append(Fault("changed", name, expected, observed, message))
            return None
        return parse_manifest(content, name=name)
    except UnsafeFile as error:
        report.faults.append(Fault(error.kind, name, "a regular file", error.kind, str(error)))
    except IntegrityError as error:
        report.faults.append(Fault("malformed", name, "a tree manifest", "something else", str(error)))
    return None


def _index_names(workdir: Path) -> list[str]:
    return sorted(name for name in os.listdir(workdir) if INDEX_NAME.fullmatch(name))

"""`longstraw run`: one work directory, one compiled pipeline, one child process that executes it; restartable."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from longstraw_core.artifacts import open_store, receipt_name, unseal_directory
from longstraw_core.artifacts.files import reporting
from longstraw_core.cli.run_display import RunDisplay
from longstraw_core.spec import SpecError, StageFailed, TransactionSpec, canonical_json, sha256_digest
from longstraw_core.spec.errors import LongStrawError, Retryable
from longstraw_core.spec.exit_codes import error_from_name
from longstraw_core.stages.events import EVENT_FILE_VARIABLE
from longstraw_core.stages.whole_file import is_partial_file, write_whole

LOCK_WAIT_SECONDS = 20.0
LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class WorkDirectory:
    """The files of one local run; everything in it belongs to the run named in `run.json`."""

    path: Path

    @property
    def identity(self) -> Path:
        """`run.json`: which specification and code this directory belongs to."""
        return self.path / "run.json"

    @property
    def pipeline(self) -> Path:
        """The compiled pipeline that is executed."""
        return self.path / "pipeline.yaml"

    @property
    def store(self) -> Path:
        """Root of the artifact store."""
        return self.path / "store"

    @property
    def pipeline_root(self) -> Path:
        """Where KFP keeps its own small artifacts."""
        return self.path / "kfp"

    @property
    def events(self) -> Path:
        """Progress events of all stages, one JSON object per line."""
        return self.path / "logs" / "events.jsonl"

    @property
    def log(self) -> Path:
        """Everything the pipeline printed."""
        return self.path / "logs" / "pipeline.log"

    @property
    def scratch(self) -> Path:
        """Temporary files of running stages; empty whenever no run is active."""
        return self.path / "scratch"

    @property
    def report(self) -> Path:
        """The last transaction's HTML report."""
        return self.path / "report.html"

    @property
    def lock(self) -> Path:
        """Held while a run is active in this directory."""
        return self.path / ".lock"


def claim(work: WorkDirectory, spec: TransactionSpec, source_digest: str) -> BinaryIO:
    """Lock the directory and check that it is empty or holds this very run.

    Returns the open lock file; the lock lasts until every process that inherited it has ended.

    Raises:
        SpecError: the directory holds another run, or files that are not a run.
        Retryable: another process is running in it.
    """
    identity = {
        "kind": "longstraw.run/1",
        "run": spec.name,
        "spec_digest": sha256_digest(canonical_json(spec)),
        "source_digest": source_digest,
        "spec": spec.to_json_object(),
    }
    if os.path.islink(work.path) or (os.path.lexists(work.path) and not os.path.isdir(work.path)):
        raise SpecError(f"{work.path}: --workdir must be a directory")
    with reporting(f"--workdir {work.path}"):
        strangers = _strangers(work)
        if strangers:
            raise SpecError(
                f"{work.path}: holds files that are no LongStraw run ({strangers[0]}…); choose another --workdir"
            )
        work.path.mkdir(parents=True, exist_ok=True)
        opened = os.open(work.lock, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        lock = os.fdopen(opened, "ab")
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Retryable(
                    f"{work.path}: another `longstraw run` is active here; wait for it or stop it"
                ) from None
            time.sleep(0.2)
    if work.identity.exists():
        _check_identity(work, identity)
    if not work.identity.exists() or work.identity.read_bytes() != canonical_json(identity):
        unseal_directory(work.path)
        write_whole(work.identity, canonical_json(identity))
    return lock


def is_finished(work: WorkDirectory, spec: TransactionSpec, transactions: int) -> bool:
    """Whether the directory is sealed and its last asked-for transaction was validated."""
    sealed = any(work.path.glob("complete.sha256-*.json"))
    return sealed and (work.store / receipt_name(spec.name, transactions, "validate_run")).exists()


def _strangers(work: WorkDirectory) -> list[str]:
    """Names in the directory that nothing of ours writes before `run.json`: stages run alone may have left a store."""
    if not work.path.exists() or work.identity.exists():
        return []
    ours = {work.lock.name, work.identity.name, work.store.name}
    return sorted(
        entry.name for entry in work.path.iterdir() if entry.name not in ours and not is_partial_file(entry.name)
    )


def prepare(work: WorkDirectory) -> None:
    """Open a claimed directory for writing: remove its seal and what killed processes left half-written."""
    with reporting(f"preparing {work.path}"):
        unseal_directory(work.path)
        for directory in (work.path, work.events.parent):
            for entry in directory.glob(".*") if directory.exists() else ():
                if is_partial_file(entry.name):
                    entry.unlink()
        shutil.rmtree(work.scratch, ignore_errors=True)
        work.scratch.mkdir()
        work.events.parent.mkdir(parents=True, exist_ok=True)
        if work.store.exists():
            open_store(work.store.resolve().as_uri()).clear_stale_staging()


def _check_identity(work: WorkDirectory, wanted: dict[str, Any]) -> None:
    try:
        found = json.loads(work.identity.read_text(encoding="utf-8"))
        digests = (found["spec_digest"], found["source_digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{work.identity}: not a run record; choose another --workdir") from error
    if digests == (wanted["spec_digest"], wanted["source_digest"]):
        return
    if not any(work.store.glob("runs/*/*/*/receipt.json")):
        return  # no stage ever finished here: nothing that the new specification could contradict
    if digests[0] != wanted["spec_digest"]:
        difference = ", ".join(_differences(found.get("spec", {}), wanted["spec"])[:4]) or "the specification"
        raise SpecError(
            f"{work.path}: already holds another run (it differs in {difference}); "
            "choose another --workdir, or delete this one"
        )
    raise SpecError(
        f"{work.path}: holds a run of another version of the code; finish it with that version, "
        "choose another --workdir, or delete this one"
    )


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            name
            for key in sorted(set(old) | set(new))
            for name in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [path]


def execute(
    work: WorkDirectory, pipeline: bytes, arguments: dict[str, Any], lock: BinaryIO, display: RunDisplay
) -> None:
    """Execute the compiled pipeline in a child process and show its events until it ends.

    Raises:
        The error that a stage reported; StageFailed when a stage or the runner ended without a word.
    """
    write_whole(work.pipeline, pipeline)
    arguments_file = work.path / "arguments.json"
    write_whole(arguments_file, canonical_json(arguments))
    position = work.events.stat().st_size if work.events.exists() else 0
    command = [
        sys.executable,
        "-m",
        "longstraw_core.cli.local_pipeline",
        str(work.pipeline),
        str(arguments_file),
        str(work.pipeline_root),
    ]
    environment = {
        **os.environ,
        EVENT_FILE_VARIABLE: str(work.events.resolve()),
        "TMPDIR": str(work.scratch.resolve()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    failure: dict[str, Any] | None = None
    active: dict[str, Any] | None = None
    with work.log.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
        )
        try:
            with _EventReader(work.events, position) as reader:
                while True:
                    ended = child.poll() is not None
                    events = reader.read()
                    for event in events:
                        if event["event"] == "stage_started":
                            active = event
                        elif event["event"] == "stage_finished":
                            active = None
                        elif event["event"] == "stage_failed":
                            failure, active = event, None
                        display.event(event)
                    if ended:
                        break
                    if not events:
                        display.tick()
                        time.sleep(0.1)
        finally:
            _kill_group(child)
            shutil.rmtree(work.scratch, ignore_errors=True)
            display.close()
    if child.returncode == 0:
        return
    if failure is not None:
        raise error_from_name(failure["error"], failure["message"])
    raise _silent_failure(work, child.returncode, active)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _silent_failure(work: WorkDirectory, returncode: int, active: dict[str, Any] | None) -> LongStrawError:
    tail = work.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    if active is not None:
        what = (
            f"transaction {active['transaction']}, stage {active['stage']}: the process ended without a word "
            "(killed, or out of memory?)"
        )
    else:
        what = f"the pipeline runner ended with status {returncode}"
    return StageFailed(f"{what}; run the same command again to continue. Last lines of {work.log}:\n" + "\n".join(tail))


class _EventReader:
    """Reads whole lines that stages append to the event file."""

    def __init__(self, path: Path, position: int) -> None:
        self._path, self._position, self._rest = path, position, b""
        self._file: BinaryIO | None = None

    def __enter__(self) -> "_EventReader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self) -> list[dict[str, Any]]:
        """Return the events that were appended since the last call."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
            self._file.seek(self._position)
        lines = (self._rest + self._file.read()).split(b"\n")
        self._rest = lines.pop()
        return [json.loads(line) for line in lines if line.strip()]

"""What launcher and ranks tell each other through the directory they share: the task, results and failures."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from longstraw_core.spec.canonical import canonical_json
from longstraw_core.spec.model import FiniteFloat, PositiveCount, StrictModel

TASK_NAME = "task.json"
REPORT_BYTES = 8192
"""Room that is kept on disk for the report of a rank, so that it can say that the disk is full."""


class RankTask(StrictModel):
    """What every rank runs."""

    entry: Annotated[str, Field(pattern=r"^\w+(\.\w+)+:\w+$")]
    """`package.module:function`, called with (request: bytes, ranks: Ranks); may return bytes."""
    request: str
    context_parallel: PositiveCount
    expert_parallel: PositiveCount
    device: str
    """`cpu` or `cuda`; a rank takes the device of its local number."""
    host: str
    """Where the launcher plans the ranks that read this."""
    timeout_seconds: Annotated[FiniteFloat, Field(gt=0.0)]
    """How long a rank waits for the others in one exchange."""


class RankFailure(StrictModel):
    """Why a rank ended early."""

    rank: int
    error: str
    """Name of the error type, as `spec.exit_codes.error_from_name` reads it."""
    message: str
    phase: str
    lost_another: bool
    """Whether this rank only noticed that another one was gone or silent."""
    time: float


def write_task(directory: Path, task: RankTask) -> None:
    """Leave the task for the ranks."""
    (directory / TASK_NAME).write_bytes(canonical_json(task))


def read_task(directory: Path) -> RankTask:
    """Return the task that the launcher left."""
    return RankTask.model_validate_json((directory / TASK_NAME).read_bytes())


def reserve_failures(directory: Path, ranks: range) -> None:
    """Take the disk space that the reports of these ranks will need."""
    for rank in ranks:
        _reserved(directory, rank).write_bytes(b" " * REPORT_BYTES)


def write_failure(directory: Path, failure: RankFailure) -> None:
    """Leave the reason for the launcher; needs no space beyond what `reserve_failures` took."""
    reserved = _reserved(directory, failure.rank)
    content = failure.model_dump_json().encode("utf-8")
    with reserved.open("r+b" if reserved.exists() else "wb") as file:
        file.write(content)
        file.truncate()
    reserved.replace(directory / f"failure-{failure.rank:05d}.json")


def read_failures(directory: Path) -> list[RankFailure]:
    """Return what ranks of this host reported, in order of time."""
    found = [RankFailure.model_validate_json(path.read_bytes()) for path in directory.glob("failure-*.json")]
    return sorted(found, key=lambda failure: failure.time)


def write_result(directory: Path, rank: int, result: bytes) -> None:
    """Leave what a rank's function returned."""
    _whole(directory / f"result-{rank:05d}", result)


def read_result(directory: Path, rank: int) -> bytes | None:
    """Return what a rank's function returned, None if it returned nothing."""
    path = directory / f"result-{rank:05d}"
    return path.read_bytes() if path.is_file() else None


def _reserved(directory: Path, rank: int) -> Path:
    return directory / f"failure-{rank:05d}.reserved"


def _whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content)
    temporary.replace(path)

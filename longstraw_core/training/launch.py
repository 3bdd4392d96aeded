"""Starts the ranks of one task with torchrun's own agent, watches them, and says which one failed and why."""

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from longstraw_core.artifacts.files import reporting
from longstraw_core.spec.errors import LongStrawError, Retryable, StageFailed
from longstraw_core.spec.exit_codes import error_from_name
from longstraw_core.training.heartbeat import Silence, read_beat
from longstraw_core.training.process_groups import Ranks, check_layout
from longstraw_core.training.rank_task import (
    RankFailure,
    RankTask,
    read_failures,
    read_result,
    reserve_failures,
    write_task,
)

SILENCE_SECONDS = 20.0
"""A rank without a new heartbeat for longer is frozen: it is killed, and with it the task."""
LOOK_SECONDS = 1.0
"""Between two looks at the heartbeats."""
SHUTDOWN_SECONDS = 5
"""Between asking the other ranks to end and killing them."""
CAUSE_FIRST_SECONDS = 5.0
"""A node whose ranks only lost one of another node ends that much later: who ends first is taken for the cause, and
Kubernetes tells whole seconds."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The hosts that run one task together, as the cluster's launcher numbers them."""

    count: int = 1
    rank: int = 0
    rendezvous: str = ""
    """`host:port` of node 0; empty with one node."""

    @classmethod
    def from_environment(cls) -> "Nodes":
        """Read LONGSTRAW_NODES, LONGSTRAW_NODE_RANK and LONGSTRAW_RENDEZVOUS."""
        return cls(
            count=int(os.environ.get("LONGSTRAW_NODES", "1")),
            rank=int(os.environ.get("LONGSTRAW_NODE_RANK", "0")),
            rendezvous=os.environ.get("LONGSTRAW_RENDEZVOUS", ""),
        )


def run_ranks(task: RankTask, directory: Path, *, nodes: Nodes | None = None) -> list[bytes | None]:
    """Run a task on all its ranks and return what the ranks of this host returned, in order of rank.

    Args:
        task: what to run; one rank per device, `task.context_parallel` in all.
        directory: new or empty, on this host; ranks and launcher meet there.

    Raises:
        SpecError: the layout is impossible.
        LongStrawError: what the failing rank reported, with its number. All ranks have ended then.
    """
    check_layout(task.context_parallel, task.expert_parallel)
    nodes = nodes or Nodes.from_environment()
    if task.context_parallel % nodes.count:
        raise StageFailed(f"{task.context_parallel} ranks cannot be dealt evenly to {nodes.count} nodes")
    local = task.context_parallel // nodes.count
    first = nodes.rank * local
    with reporting(f"preparing {local} ranks in {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        write_task(directory, task)
        reserve_failures(directory, range(first, first + local))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we report failures ourselves
    watch = _Watch(directory, range(first, first + local))
    try:
        with watch:
            elastic_launch(_config(nodes, local, directory), sys.executable)(
                "-m", "longstraw_core.training.rank_process", str(directory)
            )
    except ChildFailedError as failed:
        died = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if nodes.count > 1 and only_lost_others(directory, died):
            time.sleep(CAUSE_FIRST_SECONDS)
        raise describe_failure(directory, task, died, watch.silenced) from None
    except SignalException as received:
        if received.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise StageFailed(f"stopped by signal {received.sigval.name}; all ranks were ended") from None
    return [read_result(directory, rank) for rank in range(first, first + local)]


def run_function(
    function: Callable[[bytes, Ranks], bytes],
    request: bytes,
    directory: Path,
    *,
    context_parallel: int,
    expert_parallel: int,
    device: str = "cpu",
    timeout_seconds: float = 40.0,
) -> bytes:
    """Call a module's function on that many ranks of this host, here if it is one, and return rank 0's answer.

    Raises:
        LongStrawError: as `run_ranks`, or what the function raises.
    """
    check_layout(context_parallel, expert_parallel)
    if context_parallel == 1:
        return function(request, Ranks.alone(device))
    task = RankTask(
        entry=f"{function.__module__}:{function.__name__}",
        request=request.decode("utf-8"),
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        device=device,
        host=socket.gethostname(),
        timeout_seconds=timeout_seconds,
    )
    answer = run_ranks(task, directory / "ranks", nodes=Nodes())[0]
    if answer is None:
        raise StageFailed("rank 0 ended without an answer")
    return answer


def _config(nodes: Nodes, local: int, directory: Path) -> LaunchConfig:
    alone = nodes.count == 1
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=local,
        run_id=uuid.uuid4().hex if alone else "longstraw",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else nodes.rendezvous,
        rdzv_configs={"timeout": 60} if alone else {"timeout": 900, "rank": nodes.rank},
        local_addr="localhost" if alone else None,
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "logs")),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


class _Watch:
    """Kills ranks of this host whose heartbeat stopped, so that the agent sees a dead process and ends the others."""

    def __init__(self, directory: Path, ranks: range) -> None:
        self._directory = directory
        self._ranks = ranks
        self._silence = Silence(longest_step=2 * LOOK_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.silenced: dict[int, float] = {}
        """Ranks that were killed, and how long they had been silent."""

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            for rank in self._ranks:
                found = read_beat(self._directory, rank)
                if found is None:
                    continue
                beat, given = found
                silent = self._silence.seconds(rank, given, time.monotonic())
                if silent > SILENCE_SECONDS and rank not in self.silenced:
                    self.silenced[rank] = silent
                    try:
                        os.kill(beat.process, signal.SIGKILL)
                    except ProcessLookupError:
                        del self.silenced[rank]


def only_lost_others(directory: Path, died: dict[int, int]) -> bool:
    """Whether every rank that died here by itself reported that it lost another one."""
    lost = {failure.rank: failure.lost_another for failure in read_failures(directory)}
    silent = [code for rank, code in died.items() if rank not in lost]
    return bool(lost) and all(lost.values()) and all(code == -signal.SIGTERM for code in silent)


def describe_failure(
    directory: Path, task: RankTask, died: dict[int, int], silenced: dict[int, float]
) -> LongStrawError:
    """Return the error of the rank that failed first of its own accord; ranks that only lost it come last.

    Args:
        died: exit codes of the ranks that the agent found dead, negative for signals.
        silenced: ranks that the watch killed.
    """
    reported = read_failures(directory)
    own = [failure for failure in reported if not failure.lost_another]
    lost = [failure for failure in reported if failure.lost_another]
    heard = {failure.rank for failure in reported}
    if own:
        failure = own[0]
        return _error(task, failure.rank, failure.error, failure.message)
    for rank, seconds in silenced.items():
        return _error(
            task, rank, Retryable.__name__, f"gave no sign of life for {seconds:.0f} s (frozen) and was killed"
        )
    for rank, code in sorted(died.items()):
        if code < 0 and rank not in heard and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = "; the system kills so when memory runs out" if -code == signal.SIGKILL else ""
            return _error(task, rank, StageFailed.__name__, f"died in phase {_phase(directory, rank)}: {name}{hint}")
    if lost:
        return _silent_rank(directory, task, lost)
    codes = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(died.items()))
    return StageFailed(f"ranks ended without a report (exit codes {codes})")


def _silent_rank(directory: Path, task: RankTask, lost: list[RankFailure]) -> LongStrawError:
    """Every report is about another rank: the one that reported nothing is the one they waited for."""
    waiting = {failure.rank for failure in lost}
    silent = [rank for rank in range(task.context_parallel) if rank not in waiting]
    for rank in silent:
        found = read_beat(directory, rank)
        if found is not None:
            return _error(
                task,
                rank,
                StageFailed.__name__,
                f"did not answer the other ranks within {task.timeout_seconds:.0f} s; it has been in phase "
                f"{found[0].phase} for {found[0].phase_seconds:.0f} s and was killed",
            )
    first = lost[0]
    return _error(task, first.rank, first.error, first.message)


def _error(task: RankTask, rank: int, name: str, message: str) -> LongStrawError:
    others = task.context_parallel - 1
    stopped = f" ({others} other rank{'s' if others != 1 else ''} stopped)" if others else ""
    return error_from_name(
        name, f"rank {rank} of {task.context_parallel} on {socket.gethostname()}: {message}{stopped}"
    )


def _phase(directory: Path, rank: int) -> str:
    found = read_beat(directory, rank)
    return "start" if found is None else found[0].phase

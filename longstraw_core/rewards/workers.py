"""A pool of killable worker processes: one task per worker at a time, its deadline running from the start of work.

It uses no signals and no threads, so it works off the main thread and leaves the caller's alarms alone. What a task
returns depends on the task alone, not on the order of tasks or the number of workers.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast

import longstraw_core
from longstraw_core.spec import Retryable, SpecError

START_SECONDS = 120.0
"""How long a worker may take to import its libraries; generous, because it is not the response's time."""
DEFAULT_WORKERS = max(1, min(4, os.cpu_count() or 1))

Outcome = Mapping[str, Any] | Literal["timeout", "died"]


@dataclass
class _Worker:
    process: "subprocess.Popen[bytes]"
    started: float
    ready: bool = False
    task: int | None = None
    deadline: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class WorkerPool:
    """Starts workers when there is work, replaces those that were killed or died, ends all on `close`."""

    def __init__(self, program: Sequence[str], *, deadline_seconds: float, workers: int | None = None) -> None:
        self._program = tuple(program)
        self._deadline_seconds = deadline_seconds
        self._limit = workers or DEFAULT_WORKERS
        self._workers: list[_Worker] = []

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            _end(worker)
        self._workers.clear()

    def start(self) -> None:
        """Start one worker and wait until it has loaded what it needs.

        Raises:
            SpecError: it refuses to work, for instance because the plug-in cannot be imported.
        """
        self.run([], keep_one=True)

    def run(self, tasks: Sequence[Mapping[str, Any]], *, keep_one: bool = False) -> list[Outcome]:
        """Run every task and return what it answered, in the order of the tasks.

        Raises:
            SpecError: the workers refuse to work.
            Retryable: no worker could be started.
        """
        outcomes: list[Outcome | None] = [None] * len(tasks)
        waiting = list(range(len(tasks)))[::-1]
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    _watch(selector, worker)
                while waiting or any(worker.task is not None for worker in self._workers) or keep_one:
                    while len(self._workers) < min(self._limit, max(self._busy() + len(waiting), int(keep_one))):
                        self._workers.append(self._started())
                        _watch(selector, self._workers[-1])
                    for worker in list(self._workers):
                        if waiting and worker.ready and worker.task is None:
                            self._send(worker, waiting.pop(), tasks)
                    self._wait(selector, outcomes)
                    keep_one = keep_one and not any(worker.ready for worker in self._workers)
        except BaseException:
            self.close()
            raise
        return [outcome if outcome is not None else "died" for outcome in outcomes]

    def _busy(self) -> int:
        return sum(worker.task is not None for worker in self._workers)

    def _started(self) -> _Worker:
        root = str(Path(longstraw_core.__file__).parent.parent)
        environment = dict(os.environ)
        environment |= {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([root, *(path for path in sys.path if path)])),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-m", "longstraw_core.rewards.worker_process"]
        try:
            process = subprocess.Popen(
                [*command, str(2 * self._deadline_seconds + 10), *self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
                process_group=0,  # so that what a plug-in started ends with its worker
            )
        except OSError as error:
            raise Retryable(f"a reward worker could not be started: {error}") from error
        return _Worker(process, time.monotonic())

    def _send(self, worker: _Worker, number: int, tasks: Sequence[Mapping[str, Any]]) -> None:
        worker.task = number
        line = memoryview(json.dumps(tasks[number]).encode() + b"\n")
        try:
            while line:
                line = line[_pipe(worker.process.stdin).write(line) :]
        except OSError:
            pass  # it died: its closed output says so
        worker.deadline = time.monotonic() + self._deadline_seconds

    def _wait(self, selector: selectors.BaseSelector, outcomes: list[Outcome | None]) -> None:
        now = time.monotonic()
        ends = [
            worker.deadline if worker.ready else worker.started + START_SECONDS
            for worker in self._workers
            if worker.task is not None or not worker.ready
        ]
        if not ends:
            return
        for key, _ in selector.select(max(0.0, min(ends) - now)):
            self._receive(selector, cast(_Worker, key.data), outcomes)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.task is not None and now >= worker.deadline:
                outcomes[worker.task] = "timeout"
                self._drop(selector, worker)
            elif not worker.ready and now >= worker.started + START_SECONDS:
                self._drop(selector, worker)
                raise Retryable(f"a reward worker was not ready after {START_SECONDS:.0f} s; the machine is overloaded")

    def _receive(self, selector: selectors.BaseSelector, worker: _Worker, outcomes: list[Outcome | None]) -> None:
        received = os.read(_pipe(worker.process.stdout).fileno(), 1 << 16)
        worker.received += received
        if not received:
            if not worker.ready:
                self._drop(selector, worker)
                raise SpecError("a reward worker ended while it was loading; standard error says why")
            if worker.task is not None:
                outcomes[worker.task] = "died"
            self._drop(selector, worker)
            return
        if not worker.received.endswith(b"\n"):
            return
        record: Mapping[str, Any] = json.loads(worker.received)
        worker.received.clear()
        if "refused" in record:
            self._drop(selector, worker)
            raise SpecError(f"reward.function {self._program[-1]}: {record['refused']}")
        if worker.task is not None:
            outcomes[worker.task] = record
            worker.task = None
        worker.ready = True

    def _drop(self, selector: selectors.BaseSelector, worker: _Worker) -> None:
        selector.unregister(_pipe(worker.process.stdout))
        self._workers.remove(worker)
        _end(worker)


def _watch(selector: selectors.BaseSelector, worker: _Worker) -> None:
    selector.register(_pipe(worker.process.stdout), selectors.EVENT_READ, worker)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError("a worker has both pipes")
    return pipe


def _end(worker: _Worker) -> None:
    with suppress(ProcessLookupError):
        # the worker is not yet waited for, so no other process can have its number
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            pipe.close()

"""An SGLang server for the time of a stage: its ranks on this machine started, awaited, probed, stopped and gone.

Rank 0 answers requests and is the one whose readiness counts: the health route of every other rank says yes always.
The others follow rank 0; where they run on other machines, `follow_leader` is what runs there.
"""

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from longstraw_core.rollout.node_places import is_free, may_move, node_places
from longstraw_core.rollout.server_command import SGLANG_VERSION, NodePlace, ServedPolicy, server_command
from longstraw_core.rollout.server_process import PYTHON_VARIABLE, ServerProcess, server_python
from longstraw_core.rollout.sglang_client import ConnectionLost, SglangClient
from longstraw_core.spec import Retryable, SpecError, StageFailed
from longstraw_core.spec.transaction import ServerSpec

STOP_SECONDS = 30.0
WITHOUT_LEADER_SECONDS = 5.0
"""How long the others may take to end when rank 0 ended before it was asked to."""
FOLLOW_SECONDS = 30.0
"""How long a follower waits for a rank 0 that answered before and does not now."""
QUESTION_SECONDS = 10.0
"""Between two looks of a follower whether the work ended without a server."""
PATIENCE_SECONDS = 10.0
"""How long a follower whose own rank has ended waits for what tells that rank 0 ended too."""
LAUNCHES = 3
"""How often a server is started whose ports are taken between their choice and their use."""
_WITHOUT_SGLANG = re.compile(r"ModuleNotFoundError: No module named 'sglang'")
_TAKEN = re.compile(r"address already in use|EADDRINUSE|is not available in \d+ seconds", re.IGNORECASE)

Progress = Callable[[str, int, int], None]


class SglangServer:
    """Context manager: inside it the server answers; after it no process of it lives on this machine."""

    def __init__(
        self, policy: ServedPolicy, server: ServerSpec, *, seed: int, logs: Path, connections: int = 1
    ) -> None:
        """Choose the places of this machine's ranks; nothing is started.

        Raises:
            SpecError: the environment names a rank that is not 0.
            Retryable: no ports are free.
        """
        self._policy = policy
        self._server = server
        self._seed = seed
        self._logs = logs
        self._connections = connections
        self._launches = 0
        self._ranks: list[ServerProcess] = []
        self._earlier_logs: list[Path] = []
        self._choose_places()

    def _choose_places(self) -> None:
        self._places = node_places(self._server)
        leader = self._places[0]
        if leader.rank != 0:
            raise SpecError(f"this node has rank {leader.rank}: only rank 0 samples, the others follow it")
        self.client = SglangClient(f"http://127.0.0.1:{leader.http_port}", connections=self._connections)

    @property
    def logs(self) -> list[Path]:
        """Log files of the ranks on this machine, rank 0 first; those of launches that were repeated come before."""
        return [*self._earlier_logs, *(rank.log for rank in self._ranks)]

    def __enter__(self) -> "SglangServer":
        try:
            self.launch()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def launch(self, repeated: Callable[[str], None] | None = None) -> None:
        """Start the ranks and wait until the server answers.

        Between the choice of a free port and its use lies the time in which a rank starts. When another program took
        the port meanwhile, the launch is repeated with other ports, at most `LAUNCHES` times in all, and `repeated`
        gets the reason; ports that the specification states are not changed. No other failure is repeated: it would
        cost the time of a start and fail again.

        Raises:
            StageFailed, SpecError, Retryable: see `start` and `wait_until_ready`.
        """
        while True:
            try:
                self.start()
                self.wait_until_ready()
                return
            except (StageFailed, Retryable) as failure:
                self.stop()
                taken = isinstance(failure, Retryable) or any(rank.has_said(_TAKEN) for rank in self._ranks)
                if not taken or not may_move(self._server) or self._launches >= LAUNCHES:
                    raise
                self._earlier_logs += [rank.log for rank in self._ranks]
                self._ranks = []
                self._choose_places()
                if repeated is not None:
                    repeated(str(failure))

    def start(self) -> None:
        """Start this machine's ranks.

        Raises:
            Retryable: a port is taken: another server there would answer in this one's name.
            SpecError: no interpreter, or refused arguments.
        """
        python = server_python()
        self._launches += 1
        for place in self._places:
            if not is_free(place.host, place.http_port):
                raise Retryable(
                    f"port {place.http_port} of this machine is taken; stop what listens there or set "
                    "sampling.server.port to another"
                )
        self._logs.mkdir(parents=True, exist_ok=True)
        for place in self._places:
            command = server_command(python, self._policy, self._server, place, seed=self._seed)
            name = f"rank{place.rank}.log" if self._launches == 1 else f"rank{place.rank}-launch{self._launches}.log"
            self._ranks.append(ServerProcess(command, self._logs / name, rank=place.rank))

    def wait_until_ready(self) -> None:
        """Wait until rank 0 answers, and check that it is the server that was started.

        Raises:
            StageFailed: a rank ended, nothing answered in time, or another server answered.
            SpecError: the interpreter has no SGLang, or another version of it.
        """
        deadline = time.monotonic() + self._server.start_timeout_seconds
        while not self.client.healthy():
            self._check_that_it_starts()
            if time.monotonic() >= deadline:
                raise StageFailed(
                    f"SGLang did not answer within sampling.server.start_timeout_seconds "
                    f"({self._server.start_timeout_seconds:g} s); its log ends with: {self._ranks[0].tail()}"
                )
            time.sleep(0.5)
        self.check_alive("starting")
        info = self.client.server_info()
        served, version = info.get("model_path"), info.get("version")
        if served != str(self._policy.model):
            raise StageFailed(f"{self.client.url} serves {served!r}, not the model that was started there")
        if version != SGLANG_VERSION:
            raise SpecError(
                f"{server_python()} has sglang {version}; what is known of adapters, seeds and replies is of "
                f"{SGLANG_VERSION}: install that, or name another interpreter in {PYTHON_VARIABLE}"
            )

    def _check_that_it_starts(self) -> None:
        try:
            self.check_alive("starting")
        except StageFailed as failure:
            if any(rank.has_said(_WITHOUT_SGLANG) for rank in self._ranks):
                raise SpecError(
                    f"{server_python()} has no sglang: name in {PYTHON_VARIABLE} the interpreter of an environment "
                    f"that has {SGLANG_VERSION}"
                ) from failure
            raise

    def check_alive(self, doing: str, *, patience_seconds: float = 0.0) -> None:
        """Raise StageFailed when a rank has ended, or ends within `patience_seconds`.

        A rank may end because another one failed and has not ended yet, so the reasons in all logs are told.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            for rank in self._ranks:
                try:
                    rank.check_alive(doing)
                except StageFailed as failure:
                    others = [
                        f"; the log of rank {other.rank}: {other.tail()}" for other in self._ranks if other is not rank
                    ]
                    raise StageFailed(f"{failure}{''.join(others)}") from None
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def stop(self) -> None:
        """End rank 0 first, which takes the others along; kill what does not follow; return when all are gone."""
        self.client.close()
        failures: list[StageFailed] = []
        leader_ended = any(rank.rank == 0 and rank.exit_code() is not None for rank in self._ranks)
        for rank in sorted(self._ranks, key=lambda rank: rank.rank):
            if rank.rank == 0 or leader_ended:
                rank.interrupt()
            try:
                rank.wait_until_gone(WITHOUT_LEADER_SECONDS if leader_ended else STOP_SECONDS)
            except StageFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def explain(self, failure: StageFailed) -> StageFailed:
        """Return the better reason for a failed request: why the server died, if it did."""
        if isinstance(failure, ConnectionLost):
            try:
                self.check_alive("sampling", patience_seconds=15.0)
            except StageFailed as reason:
                return reason
        return failure


def follow_leader(
    policy: ServedPolicy,
    server: ServerSpec,
    place: NodePlace,
    *,
    seed: int,
    logs: Path,
    progress: Progress | None = None,
    is_over: Callable[[], bool] | None = None,
) -> None:
    """Run one rank above 0 on this machine until rank 0 is gone; returns when nothing of it lives.

    `is_over` is asked while rank 0 has not answered yet: whether it will not start, or has ended, because nothing is
    left to do.

    Raises:
        StageFailed: this rank ended while rank 0 was still answering, or rank 0 never answered.
    """
    logs.mkdir(parents=True, exist_ok=True)
    command = server_command(server_python(), policy, server, place, seed=seed)
    rank = ServerProcess(command, logs / f"rank{place.rank}.log", rank=place.rank)
    try:
        _follow(rank, server, place, progress, is_over)
    finally:
        rank.interrupt()
        rank.wait_until_gone(STOP_SECONDS)


def _follow(
    rank: ServerProcess,
    server: ServerSpec,
    place: NodePlace,
    progress: Progress | None,
    is_over: Callable[[], bool] | None,
) -> None:
    began, last_seen = time.monotonic(), None
    next_question = began
    while True:
        now = time.monotonic()
        if _answers(place.leader, place.http_port):
            last_seen = now
        if last_seen is not None and now - last_seen > FOLLOW_SECONDS:
            return
        if last_seen is None and is_over is not None and now >= next_question:
            if is_over():
                return
            next_question = now + QUESTION_SECONDS
        if last_seen is None and now - began > server.start_timeout_seconds:
            raise StageFailed(f"rank 0 ({place.leader}:{place.http_port}) did not answer; this rank: {rank.tail()}")
        if rank.exit_code() is not None:
            # A rank ends with its leader, which closes its port meanwhile; one that still answers has lost this rank
            # for another reason. A leader that came and went between two looks has stored that sampling is over.
            if last_seen is not None and _comes_true(lambda: not _answers(place.leader, place.http_port)):
                return
            if last_seen is None and is_over is not None and _comes_true(is_over):
                return
            rank.check_alive("following rank 0")
        if progress is not None:
            progress("seconds beside rank 0", int(now - began), int(now - began) + 1)
        time.sleep(1.0)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return True
    except OSError:
        return False


def _comes_true(question: Callable[[], bool]) -> bool:
    """Whether the answer is yes within `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not question():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True

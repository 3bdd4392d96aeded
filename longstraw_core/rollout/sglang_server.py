"""An SGLang server for the time of a stage: its ranks on this machine started, awaited, probed, stopped and gone.

Rank 0 answers requests and is the one whose readiness counts: the health route of every other rank says yes always.
The others follow rank 0; where they run on other machines, `follow_leader` is what runs there.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from longstraw_core.rollout.server_command import SGLANG_VERSION, NodePlace, ServedPolicy, server_command
from longstraw_core.rollout.server_process import PYTHON_VARIABLE, ServerProcess, server_python
from longstraw_core.rollout.sglang_client import ConnectionLost, SglangClient
from longstraw_core.spec import Retryable, SpecError, StageFailed
from longstraw_core.spec.transaction import ServerSpec

RANK_VARIABLE = "LONGSTRAW_NODE_RANK"
"""Number of this node among `sampling.server.nodes`; absent where one machine runs them all."""
LEADER_VARIABLE = "LONGSTRAW_NODE_LEADER"
"""Host name or address of the node of rank 0, as the others reach it."""
DEFAULT_HTTP_PORT = 30000
DEFAULT_RENDEZVOUS_PORT = 20000
RENDEZVOUS_PORTS = 12
"""The server uses this many ports from the rendezvous port on."""
STOP_SECONDS = 30.0
FOLLOW_SECONDS = 30.0
"""How long a follower waits for a rank 0 that answered before and does not now."""
QUESTION_SECONDS = 10.0
"""Between two looks of a follower whether the work ended without a server."""

Progress = Callable[[str, int, int], None]


def node_places(server: ServerSpec) -> list[NodePlace]:
    """Where the ranks that this machine runs stand: all of them, or the one that the environment names.

    Raises:
        SpecError: the environment's rank is no rank of the server, or has no leader.
    """
    stated = os.environ.get(RANK_VARIABLE)
    if stated is None:
        ports = _free_ports(server.nodes + RENDEZVOUS_PORTS)
        http = [server.port, *ports[1 : server.nodes]] if server.port else ports[: server.nodes]
        meet = server.rendezvous_port or _free_range(RENDEZVOUS_PORTS)
        return [NodePlace(rank=rank, http_port=port, rendezvous_port=meet) for rank, port in enumerate(http)]
    leader = os.environ.get(LEADER_VARIABLE, "")
    if not stated.isdecimal() or int(stated) >= server.nodes or not leader:
        raise SpecError(
            f"{RANK_VARIABLE}={stated!r} with {LEADER_VARIABLE}={leader!r}: there must be a leader and a rank below "
            f"sampling.server.nodes ({server.nodes})"
        )
    return [
        NodePlace(
            rank=int(stated),
            leader=leader,
            http_port=server.port or DEFAULT_HTTP_PORT,
            rendezvous_port=server.rendezvous_port or DEFAULT_RENDEZVOUS_PORT,
            host="0.0.0.0",  # noqa: S104 - the other nodes watch this port
        )
    ]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


def _free_range(count: int) -> int:
    """Return the first of `count` successive ports that are free now."""
    for first in range(21000, 29000, count):
        if all(_is_free("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise Retryable(f"no {count} successive ports are free on this machine; run again")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class SglangServer:
    """Context manager: inside it the server answers; after it no process of it lives on this machine."""

    def __init__(
        self,
        policy: ServedPolicy,
        server: ServerSpec,
        places: Sequence[NodePlace],
        *,
        seed: int,
        logs: Path,
        connections: int = 1,
    ) -> None:
        self._policy = policy
        self._server = server
        self._places = list(places)
        self._seed = seed
        self._logs = logs
        self._ranks: list[ServerProcess] = []
        leader = next((place for place in places if place.rank == 0), None)
        if leader is None:
            raise SpecError(f"this node has rank {places[0].rank}: only rank 0 samples, the others follow it")
        self.client = SglangClient(f"http://127.0.0.1:{leader.http_port}", connections=connections)

    @property
    def logs(self) -> list[Path]:
        """Log files of the ranks on this machine, rank 0 first."""
        return [rank.log for rank in self._ranks]

    def __enter__(self) -> "SglangServer":
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start this machine's ranks.

        Raises:
            Retryable: a port is taken: another server there would answer in this one's name.
            SpecError: no interpreter, or refused arguments.
        """
        python = server_python()
        for place in self._places:
            if not _is_free(place.host, place.http_port):
                raise Retryable(
                    f"port {place.http_port} of this machine is taken; stop what listens there or set "
                    "sampling.server.port to another"
                )
        self._logs.mkdir(parents=True, exist_ok=True)
        for place in self._places:
            command = server_command(python, self._policy, self._server, place, seed=self._seed)
            self._ranks.append(ServerProcess(command, self._logs / f"rank{place.rank}.log", rank=place.rank))

    def wait_until_ready(self) -> None:
        """Wait until rank 0 answers, and check that it is the server that was started.

        Raises:
            StageFailed: a rank ended, nothing answered in time, or another server answered.
            SpecError: it is another version of SGLang.
        """
        deadline = time.monotonic() + self._server.start_timeout_seconds
        while not self.client.healthy():
            self.check_alive("starting")
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

    def check_alive(self, doing: str, *, patience_seconds: float = 0.0) -> None:
        """Raise StageFailed with the reason from the log when a rank has ended, or ends within `patience_seconds`."""
        deadline = time.monotonic() + patience_seconds
        while True:
            for rank in self._ranks:
                rank.check_alive(doing)
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def stop(self) -> None:
        """End rank 0 first, which takes the others along; kill what does not follow; return when all are gone."""
        self.client.close()
        failures: list[StageFailed] = []
        for rank in sorted(self._ranks, key=lambda rank: rank.rank):
            if rank.rank == 0:
                rank.interrupt()
            try:
                rank.wait_until_gone(STOP_SECONDS)
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

    `is_over` is asked while rank 0 has not answered yet: whether it will never start, because nothing is left to do.

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
            # A rank ends with its leader. A leader that still answers has lost this rank for another reason.
            if last_seen is not None and not _answers_within(place, 10.0):
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


def _answers_within(place: NodePlace, seconds: float) -> bool:
    """Whether rank 0 is still there after `seconds`; a leader that is going down closes its port meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not _answers(place.leader, place.http_port):
            return False
        time.sleep(0.5)
    return True

"""Launch, readiness, death and end of a server, with the stand-in process; nothing of it survives."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from longstraw_core.rollout import die_with_parent, sglang_server
from longstraw_core.rollout.node_places import free_ports, node_places
from longstraw_core.rollout.process_session import session_processes, wait_for_end
from longstraw_core.rollout.server_command import NodePlace, ServedPolicy
from longstraw_core.rollout.server_process import ServerProcess, log_tail, server_environment
from longstraw_core.rollout.sglang_sampler import sample_groups
from longstraw_core.rollout.sglang_server import SglangServer, follow_leader
from longstraw_core.spec import Retryable, Rollout, SpecError, StageFailed
from longstraw_core.spec.transaction import SamplingSpec, ServerSpec
from tests.servers.ports import free_port
from tests.support.sglang.cpu import fake_environment
from tests.support.sglang.oracle import prompt_of, wanted

Launch = Callable[..., SglangServer]


@pytest.fixture
def launch(untrained_snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    fake_environment(monkeypatch)
    started: list[SglangServer] = []

    def start(**fields: object) -> SglangServer:
        settings = ServerSpec(start_timeout_seconds=30.0, context_length=512, **fields)  # type: ignore[arg-type]
        policy = ServedPolicy(untrained_snapshot, tmp_path, "float32", positions=4096)
        server = SglangServer(policy, settings, seed=1, logs=tmp_path / "logs", connections=40)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def sessions(server: SglangServer) -> list[int]:
    return [rank.session for rank in server._ranks]


def test_a_started_server_answers_and_afterwards_none_of_its_processes_lives(launch: Launch) -> None:
    with launch() as server:
        (session,) = sessions(server)
        assert len(session_processes(session)) >= 2
        rollout = server.client.sample(wanted(prompt_of(9)), timeout_seconds=10.0)
        assert len(rollout.token_ids) == 12
        rank = server._ranks[0]
    assert not session_processes(session)
    assert rank._guard.poll() == 0


def test_all_ranks_of_one_machine_are_started_and_ended(launch: Launch) -> None:
    with launch(nodes=2, tensor_parallel=2) as server:
        assert [rank.rank for rank in server._ranks] == [0, 1]
        assert [log.name for log in server.logs] == ["rank0.log", "rank1.log"]
        found = sessions(server)
    assert not any(session_processes(session) for session in found)


def test_a_server_that_ends_at_the_start_is_reported_with_its_reason(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_BROKEN", "no such attention backend")
    with pytest.raises(StageFailed, match=r"rank 0 ended \(exit code 1\) while starting; .*no such attention backend"):
        launch().__enter__()


def test_an_interpreter_without_sglang_is_named_with_the_variable_that_chooses_it(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGSTRAW_SGLANG_PYTHONPATH")
    with pytest.raises(SpecError, match=r"has no sglang: name in LONGSTRAW_SGLANG_PYTHON the interpreter"):
        launch().__enter__()


def test_a_server_that_never_answers_is_given_up_and_ended(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    server = launch()
    monkeypatch.setattr(server, "_server", server._server.model_copy(update={"start_timeout_seconds": 0.5}))
    monkeypatch.setattr(server.client, "healthy", lambda: False)
    with pytest.raises(StageFailed, match=r"did not answer within sampling\.server\.start_timeout_seconds \(0\.5 s\)"):
        server.__enter__()
    assert not session_processes(sessions(server)[0])


def test_a_taken_port_is_refused_before_anything_is_started(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = launch(port=port)
        with pytest.raises(Retryable, match=f"port {port} of this machine is taken"):
            server.__enter__()
    assert not sessions(server)


def steal(monkeypatch: pytest.MonkeyPatch, option: str, launches: int) -> list[socket.socket]:
    """Let another program take the port of `option` after it was chosen and before the first rank binds it."""
    honest = sglang_server.ServerProcess
    thieves: list[socket.socket] = []

    def too_late(command: list[str], log: Path, *, rank: int) -> ServerProcess:
        if rank == 0 and len(thieves) < launches:
            port = int(command[command.index(option) + 1].rpartition(":")[2])
            thieves.append(socket.create_server(("127.0.0.1", port)))
        return honest(command, log, rank=rank)

    monkeypatch.setattr(sglang_server, "ServerProcess", too_late)
    monkeypatch.setattr("longstraw_core.rollout.sglang_client.HEALTH_SECONDS", 1.0)  # a thief never answers
    return thieves


@pytest.mark.parametrize("option", ["--port", "--dist-init-addr"])
def test_a_port_taken_after_its_choice_leads_to_a_launch_with_others(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (thieves, reasons) = steal(monkeypatch, option, 1), []
    server = launch(nodes=2, tensor_parallel=2)
    first = server.client.url
    server.launch(reasons.append)
    assert len(thieves) == 1
    assert server.client.url != first
    assert len(server.client.sample(wanted(prompt_of(9)), timeout_seconds=10.0).token_ids) == 12
    (reason,) = reasons
    assert "ended" in reason
    assert "ddress already in use" in reason
    assert [log.name for log in server.logs] == ["rank0.log", "rank1.log", "rank0-launch2.log", "rank1-launch2.log"]
    server.stop()
    assert not any(map(session_processes, sessions(server)))
    thieves[0].close()


def test_a_launch_is_repeated_twice_and_never_for_another_reason(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    thieves, reasons = steal(monkeypatch, "--port", 9), list[str]()
    with pytest.raises(StageFailed, match=r"rank 0 ended .*ddress already in use"):
        launch().launch(reasons.append)
    assert (len(thieves), len(reasons)) == (3, 2)
    for thief in thieves:
        thief.close()
    port = free_port()
    thieves[:] = []
    with pytest.raises(StageFailed, match="ddress already in use"):
        launch(port=port).launch(reasons.append)  # a stated port is not exchanged
    thieves.pop().close()
    monkeypatch.setattr(sglang_server, "ServerProcess", ServerProcess)
    monkeypatch.setenv("FAKE_SGLANG_BROKEN", "no such attention backend")
    with pytest.raises(StageFailed, match="no such attention backend"):
        launch().launch(reasons.append)
    assert len(reasons) == 2


def test_when_one_rank_takes_another_along_the_reasons_of_both_are_told(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(command: list[str], log: Path, *, rank: int) -> ServerProcess:
        lines = ("RuntimeError: rank 0 is the cause", "RuntimeError: connection reset")
        end = ("time.sleep(60)", "sys.exit(1)")  # rank 0 has not ended yet when rank 1 has
        program = f"import sys, time; print({lines[rank]!r}, flush=True); time.sleep({rank}); {end[rank]}"
        return ServerProcess([sys.executable, "-c", program], log, rank=rank)

    monkeypatch.setattr(sglang_server, "ServerProcess", failing)
    with pytest.raises(
        StageFailed, match=r"rank 1 ended \(exit code 1\).*connection reset; the log of rank 0: .*rank 0 is the cause"
    ):
        launch(nodes=2, tensor_parallel=2).__enter__()


def test_ports_are_chosen_outside_the_range_that_the_kernel_hands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "ip_local_port_range"
    monkeypatch.setattr("longstraw_core.rollout.node_places._EPHEMERAL", kernel)
    for lowest, highest in ((32768, 60999), (15000, 60999), (9000, 12000)):
        kernel.write_text(f"{lowest}\t{highest}\n", encoding="ascii")
        firsts = {free_ports(14) for _ in range(20)}
        assert len(firsts) > 1
        assert all(not lowest <= port <= highest for first in firsts for port in (first, first + 13))
    kernel.write_text("1\t65535\n", encoding="ascii")
    assert free_ports(14) in range(10000, 20000)


def test_a_server_of_another_model_on_our_port_is_not_believed(launch: Launch, tmp_path: Path) -> None:
    with launch() as server:
        server._policy = ServedPolicy(tmp_path / "other", None, "float32", 10)
        with pytest.raises(StageFailed, match="not the model that was started there"):
            server.wait_until_ready()


def test_another_version_of_the_server_is_refused(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG_VERSION", "0.6.0")
    with pytest.raises(SpecError, match=r"has sglang 0\.6\.0; what is known .* is of 0\.5\.23"):
        launch().__enter__()


def test_a_server_killed_while_sampling_fails_the_stage_with_its_reason(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_DIE_AFTER", "5")
    finished: dict[str, list[Rollout]] = {}
    groups = [[wanted(prompt_of(5, name), index, seed=index) for index in range(2)] for name in ("a", "b", "c", "d")]
    with launch() as server:
        with pytest.raises(StageFailed) as caught:
            sample_groups(
                server.client,
                groups,
                SamplingSpec(engine="sglang", concurrent_requests=1),
                finished=finished.__setitem__,
            )
        reason = str(server.explain(caught.value))
    assert "ended (exit code -9) while sampling" in reason
    assert "the fake server was told to die" in reason
    assert set(finished) == {"a", "b"}


def test_no_more_responses_are_asked_for_at_once_than_allowed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.005")
    seen: list[tuple[int, int]] = []
    groups = [[wanted(prompt_of(5, f"p{number}"), index, seed=index) for index in range(4)] for number in range(5)]
    finished: dict[str, list[Rollout]] = {}
    with launch() as server:
        sample_groups(
            server.client,
            groups,
            SamplingSpec(engine="sglang", concurrent_requests=3),
            finished=finished.__setitem__,
            progress=lambda what, done, total: seen.append((done, total)),
        )
        assert server.client.server_info()["most_running"] == 3
    assert [len(group) for group in finished.values()] == [4] * 5
    assert seen == [(done, 20) for done in range(1, 21)]


def test_a_token_budget_is_never_exceeded_and_finished_groups_are_kept(launch: Launch) -> None:
    finished: dict[str, list[Rollout]] = {}
    groups = [[wanted(prompt_of(5, f"p{number}"), index, seed=index) for index in range(2)] for number in range(3)]
    sampling = SamplingSpec(engine="sglang", max_response_tokens=12, max_total_tokens=60)
    with launch() as server, pytest.raises(StageFailed, match=r"max_total_tokens \(60\) .* 4 of 6 responses"):
        sample_groups(server.client, groups, sampling, finished=finished.__setitem__, tokens_used=12)
    assert set(finished) == {"p0", "p1"}


def test_one_response_too_slow_is_aborted_and_the_whole_too_slow_fails(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.2")
    finished: dict[str, list[Rollout]] = {}
    slow = [[wanted(prompt_of(5, "slow"), 0, max_tokens=300)]]
    with launch() as server:
        sample_groups(
            server.client,
            slow,
            SamplingSpec(engine="sglang", request_timeout_seconds=1.0),
            finished=finished.__setitem__,
        )
        (aborted,) = finished["slow"]
        assert aborted.finish_reason == "abort"
        assert 1 <= len(aborted.token_ids) < 300
        finished.clear()
        # what the end of the stage's time cuts off is no finished response, though the abort comes back first
        with pytest.raises(StageFailed, match=r"timeout_seconds \(1\.4 s\) is over with 0 of 1"):
            sample_groups(
                server.client, slow, SamplingSpec(engine="sglang", timeout_seconds=1.4), finished=finished.__setitem__
            )
        assert not finished


def test_a_rank_that_dies_while_rank_0_hangs_ends_the_sampling(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "1.0")
    groups = [[wanted(prompt_of(5, "slow"), 0, max_tokens=300)]]
    with launch(nodes=2, tensor_parallel=2) as server:
        killer = threading.Timer(0.5, os.kill, [sessions(server)[1], signal.SIGKILL])
        killer.start()
        with pytest.raises(StageFailed, match=r"rank 1 ended \(exit code -9\) while sampling"):
            sample_groups(
                server.client,
                groups,
                SamplingSpec(engine="sglang", timeout_seconds=60.0),
                finished=lambda *_: None,
                check_alive=lambda: server.check_alive("sampling"),
            )
        killer.join()


def test_a_server_ends_with_the_stage_that_is_killed(untrained_snapshot: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from longstraw_core.rollout.server_process import ServerProcess\n"
        "server = ServerProcess([sys.executable, '-c', 'import time; time.sleep(300)'], Path(sys.argv[1]), rank=0)\n"
        "print(server.session, flush=True); time.sleep(300)\n"
    )
    stage = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")], stdout=subprocess.PIPE)
    assert stage.stdout is not None
    session = int(stage.stdout.readline())
    assert session_processes(session)
    stage.kill()
    stage.wait()
    deadline = time.monotonic() + 30.0
    while session_processes(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not session_processes(session)
    stage.stdout.close()


def test_a_stage_killed_before_the_guard_runs_leaves_no_server(tmp_path: Path) -> None:
    """The stage ends in the instant in which it would start the guard."""
    program = (
        "import os, signal, subprocess, sys; from pathlib import Path\n"
        "from longstraw_core.rollout.server_process import ServerProcess\n"
        "honest = subprocess.Popen\n"
        "def start(command, **options):\n"
        "    if 'longstraw_core.rollout.server_guard' in command:\n"
        "        sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    started = honest(command, **options)\n"
        "    print(started.pid)\n"
        "    while b'up' not in Path(sys.argv[1]).read_bytes(): pass\n"
        "    return started\n"
        "subprocess.Popen = start\n"
        "sleep = 'print(\"up\", flush=True); import time; time.sleep(300)'\n"
        "ServerProcess([sys.executable, '-c', sleep], Path(sys.argv[1]), rank=0)\n"
    )
    stage = subprocess.run([sys.executable, "-c", program, str(tmp_path / "log")], stdout=subprocess.PIPE, check=False)
    assert stage.returncode == -signal.SIGKILL
    assert (tmp_path / "log").read_text() == "up\n"
    assert wait_for_end(int(stage.stdout), 30.0)


def test_a_server_whose_stage_ended_before_it_began_is_not_started() -> None:
    command = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid() + 1), "/bin/echo", "started"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "the stage ended before its server was started\n"
    command[4] = str(os.getpid())
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "started\n"


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere/python cannot be started: no executable file; set LONGSTRAW_SGLANG"):
        ServerProcess([str(tmp_path / "nowhere" / "python")], tmp_path / "log", rank=0)
    text = tmp_path / "python"
    text.write_text("not a program", encoding="utf-8")
    text.chmod(0o755)
    process = ServerProcess([str(text)], tmp_path / "log", rank=0)
    process.wait_until_gone(30.0)
    with pytest.raises(StageFailed, match=r"\(exit code 127\) while starting.*python cannot be started: Exec format"):
        process.check_alive("starting")


def test_what_ignores_an_interrupt_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    process = ServerProcess([sys.executable, "-c", stubborn + "time.sleep(300)"], tmp_path / "log", rank=0)
    deadline = time.monotonic() + 30.0
    while "up" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.interrupt()
    process.wait_until_gone(0.3)
    assert not session_processes(process.session)
    assert process.exit_code() == -signal.SIGKILL


def test_a_follower_ends_with_its_leader(
    launch: Launch, untrained_snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longstraw_core.rollout.sglang_server.FOLLOW_SECONDS", 1.0)
    settings = ServerSpec(nodes=2, tensor_parallel=2, start_timeout_seconds=30.0, context_length=512)
    leader = launch()
    with leader:
        port = int(leader.client.url.rsplit(":", 1)[1])
        place = NodePlace(rank=1, http_port=port)
        policy = ServedPolicy(untrained_snapshot, tmp_path, "float32", positions=4096)
        seconds: list[int] = []

        def follow() -> None:
            monkeypatch.setattr(
                "longstraw_core.rollout.sglang_server.server_command",
                lambda *_, **__: [sys.executable, "-c", "import time; time.sleep(300)"],
            )
            follow_leader(
                policy,
                settings,
                place,
                seed=1,
                logs=tmp_path / "follower",
                progress=lambda _, done, __: seconds.append(done),
            )

        thread = threading.Thread(target=follow)
        thread.start()
        deadline = time.monotonic() + 30.0
        while len(seconds) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert thread.is_alive()
    thread.join(30.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_follower_whose_rank_ended_before_it_saw_the_leader_asks_whether_sampling_is_over(
    untrained_snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """A leader may come and go between two looks, and writes the receipt a little after its server has gone."""
    monkeypatch.setattr("longstraw_core.rollout.sglang_server.PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(
        "longstraw_core.rollout.sglang_server.server_command", lambda *_, **__: [sys.executable, "-c", "pass"]
    )
    questions: list[float] = []

    def over() -> bool:
        questions.append(time.monotonic())
        return is_over and len(questions) > 2

    policy = ServedPolicy(untrained_snapshot, tmp_path, "float32", positions=4096)
    settings = ServerSpec(nodes=2, tensor_parallel=2, start_timeout_seconds=30.0, context_length=512)
    place = NodePlace(rank=1, http_port=free_port())
    with (
        nullcontext() if is_over else pytest.raises(StageFailed, match=r"rank 1 ended \(exit code 0\) while following")
    ):
        follow_leader(policy, settings, place, seed=1, logs=tmp_path / "follower", is_over=over)
    assert len(questions) > 2


def test_places_come_from_the_environment_where_nodes_are_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerSpec(nodes=4, tensor_parallel=8)
    assert [place.rank for place in node_places(server)] == [0, 1, 2, 3]
    assert len({place.http_port for place in node_places(server)}) == 4
    monkeypatch.setenv("LONGSTRAW_NODE_RANK", "2")
    with pytest.raises(SpecError, match="there must be a leader"):
        node_places(server)
    monkeypatch.setenv("LONGSTRAW_NODE_LEADER", "sampler-0.sampler")
    (place,) = node_places(server)
    assert (place.rank, place.leader, place.http_port, place.rendezvous_port) == (2, "sampler-0.sampler", 30000, 20000)
    with pytest.raises(SpecError, match="only rank 0 samples"):
        SglangServer(ServedPolicy(Path("m"), None, "float32", 9), server, seed=0, logs=Path("x"))
    monkeypatch.setenv("LONGSTRAW_NODE_RANK", "4")
    with pytest.raises(SpecError, match=r"below sampling\.server\.nodes \(4\)"):
        node_places(server)


def test_the_server_gets_no_credentials_and_not_our_interpreters_paths() -> None:
    found = server_environment(
        {
            "AWS_SECRET_ACCESS_KEY": "s",
            "LONGSTRAW_SIGNING_KEY": "k",
            "PYTHONPATH": "ours",
            "LONGSTRAW_SGLANG_PYTHONPATH": "theirs",
            "NCCL_SOCKET_IFNAME": "eth0",
            "PATH": os.environ["PATH"],
        }
    )
    assert found["PYTHONPATH"] == "theirs"
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert not any(name.startswith(("AWS_", "LONGSTRAW_")) for name in found)
    assert "PYTHONPATH" not in server_environment({"PYTHONPATH": "ours"})
    dumps = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    assert (found[dumps], server_environment({dumps: "1"})[dumps]) == ("0", "1")


def test_the_tail_of_a_log_has_the_reason_and_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    lines = ["starting", "ValueError: rank 3 is too large", *(f"line {number}" for number in range(50)), "Killed"]
    log.write_text("\n".join(lines), encoding="utf-8")
    assert log_tail(log) == "ValueError: rank 3 is too large | line 48 | line 49 | Killed"
    assert log_tail(tmp_path / "none").startswith("(no log")

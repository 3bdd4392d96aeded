"""The server's arguments follow from the specification; what the stage decides cannot be overruled."""

from pathlib import Path

import pytest

from longstraw_core.rollout.server_command import NodePlace, ServedPolicy, check_server_arguments, server_command
from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import ServerSpec

POLICY = ServedPolicy(Path("/m"), Path("/a"), "bfloat16", positions=4096)


def arguments(server: ServerSpec, place: NodePlace | None = None, policy: ServedPolicy = POLICY) -> dict[str, str]:
    command = server_command("python3", policy, server, place or NodePlace(), seed=2**40 + 3)
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    found: dict[str, str] = {}
    for word, following in zip(command[3:], [*command[4:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_one_node_with_an_adapter() -> None:
    found = arguments(ServerSpec())
    assert found["--model-path"] == "/m"
    assert (found["--dtype"], found["--context-length"]) == ("bfloat16", "4096")
    assert found["--lora-paths"] == "policy=/a"
    assert {"--lora-strict-loading", "--skip-tokenizer-init", "--enable-deterministic-inference"} <= set(found)
    assert found["--random-seed"] == "3"
    assert not {"--nnodes", "--mem-fraction-static", "--max-total-tokens", "--allow-auto-truncate"} & set(found)


def test_every_field_of_the_server_reaches_the_command_line() -> None:
    server = ServerSpec(
        tensor_parallel=4,
        pipeline_parallel=2,
        nodes=2,
        context_length=1000,
        memory_fraction=0.5,
        cache_tokens=3000,
        running_requests=9,
        deterministic=False,
        arguments=("--attention-backend", "fa3"),
        start_timeout_seconds=90.0,
    )
    found = arguments(server, NodePlace(rank=1, leader="pod-0", rendezvous_port=20000, host="0.0.0.0"))  # noqa: S104
    assert (found["--tp-size"], found["--pp-size"], found["--nnodes"], found["--node-rank"]) == ("4", "2", "2", "1")
    assert (found["--dist-init-addr"], found["--dist-timeout"], found["--host"]) == ("pod-0:20000", "90", "0.0.0.0")  # noqa: S104
    assert (found["--context-length"], found["--mem-fraction-static"]) == ("1000", "0.5")
    assert (found["--max-total-tokens"], found["--max-running-requests"]) == ("3000", "9")
    assert found["--attention-backend"] == "fa3"
    assert "--enable-deterministic-inference" not in found


def test_a_merged_policy_has_no_adapter() -> None:
    found = arguments(ServerSpec(merge=True), policy=ServedPolicy(Path("/m"), None, "float32", 10))
    assert not any("lora" in name for name in found)


@pytest.mark.parametrize(
    "argument",
    ["--model-path", "--port=3", "--lora_paths", "--max-tot", "--allow-auto-truncate", "--trust-remote-code"],
)
def test_what_the_stage_decides_is_refused(argument: str) -> None:
    with pytest.raises(SpecError, match=r"sampling\.server\.arguments"):
        check_server_arguments(("--attention-backend", "fa3", argument))


def test_more_context_than_positions_is_refused() -> None:
    with pytest.raises(SpecError, match="5000 exceeds the model's 4096 positions"):
        arguments(ServerSpec(context_length=5000))

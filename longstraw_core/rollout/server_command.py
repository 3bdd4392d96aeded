"""The command line of `sglang.launch_server` (0.5.23) for one rank of a server; reads and starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import ServerSpec

SGLANG_VERSION = "0.5.23"
ADAPTER_NAME = "policy"
"""Name under which requests ask for the adapter."""

OURS = frozenset(
    {
        "--model-path",
        "--model",
        "--tokenizer-path",
        "--skip-tokenizer-init",
        "--load-format",
        "--trust-remote-code",
        "--dtype",
        "--context-length",
        "--host",
        "--port",
        "--tp-size",
        "--tensor-parallel-size",
        "--tp",
        "--pp-size",
        "--pipeline-parallel-size",
        "--pp",
        "--nnodes",
        "--node-rank",
        "--dist-init-addr",
        "--nccl-init-addr",
        "--dist-timeout",
        "--mem-fraction-static",
        "--max-total-tokens",
        "--max-running-requests",
        "--random-seed",
        "--enable-deterministic-inference",
        "--enable-lora",
        "--lora-paths",
        "--max-loras-per-batch",
        "--lora-strict-loading",
        "--lora-target-modules",
        "--max-lora-rank",
        "--allow-auto-truncate",
        "--skip-server-warmup",
        "--json-model-override-args",
        "--api-key",
        "--config",
    }
)
"""Arguments that the stage decides, or that would change what a response means."""


@dataclass(frozen=True)
class NodePlace:
    """Where one rank's process stands among the nodes of a server."""

    rank: int = 0
    leader: str = "127.0.0.1"
    """Host name or address of the node of rank 0."""
    http_port: int = 30000
    rendezvous_port: int = 20000
    """The server also uses some ports after this one."""
    host: str = "127.0.0.1"
    """Address that this rank's own HTTP server listens on."""


@dataclass(frozen=True)
class ServedPolicy:
    """What is served."""

    model: Path
    adapter: Path | None
    """None when the adapter is merged into the model."""
    dtype: str
    positions: int
    """Tokens of prompt and response together that the model can take."""


def check_server_arguments(arguments: Sequence[str]) -> None:
    """Refuse further arguments that the stage decides itself.

    Raises:
        SpecError: naming the argument.
    """
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and any(ours.startswith(name) for ours in OURS):
            raise SpecError(
                f"sampling.server.arguments: {argument} is decided by the stage itself; use the fields of sampling, "
                "model and lora"
            )


def context_length(policy: ServedPolicy, server: ServerSpec) -> int:
    """Tokens of prompt and response together that the server is started for.

    Raises:
        SpecError: more than the model has.
    """
    if server.context_length is None:
        return policy.positions
    if server.context_length > policy.positions:
        raise SpecError(
            f"sampling.server.context_length {server.context_length} exceeds the model's {policy.positions} positions; "
            "lower it or set model.rope_scaling"
        )
    return server.context_length


def server_command(python: str, policy: ServedPolicy, server: ServerSpec, place: NodePlace, *, seed: int) -> list[str]:
    """Return the argument list that starts one rank.

    Args:
        python: interpreter of the environment that has SGLang.
        seed: the run's seed; all ranks of a server must be given the same.

    Raises:
        SpecError: an argument of the specification is refused.
    """
    check_server_arguments(server.arguments)
    command = [python, "-m", "sglang.launch_server"]

    def add(name: str, value: object) -> None:
        command.extend((name, str(value)))

    add("--model-path", policy.model)
    add("--load-format", "safetensors")
    add("--dtype", policy.dtype)
    add("--context-length", context_length(policy, server))
    add("--host", place.host)
    add("--port", place.http_port)
    add("--tp-size", server.tensor_parallel)
    add("--pp-size", server.pipeline_parallel)
    if server.nodes > 1:
        add("--nnodes", server.nodes)
        add("--node-rank", place.rank)
        add("--dist-init-addr", f"{place.leader}:{place.rendezvous_port}")
        add("--dist-timeout", max(1, round(server.start_timeout_seconds)))
    # token ids in, token ids out: a tokenizer in the server could only disagree with the trainer's
    command += ["--skip-tokenizer-init", "--skip-server-warmup"]
    add("--random-seed", seed % 2**31)
    if server.deterministic:
        command.append("--enable-deterministic-inference")
    for name, value in (
        ("--mem-fraction-static", server.memory_fraction),
        ("--max-total-tokens", server.cache_tokens),
        ("--max-running-requests", server.running_requests),
    ):
        if value is not None:
            add(name, value)
    if policy.adapter is not None:
        command += ["--enable-lora", "--lora-paths", f"{ADAPTER_NAME}={policy.adapter}", "--lora-strict-loading"]
        add("--max-loras-per-batch", 2)  # the server's own health request runs without an adapter
    return [*command, *server.arguments]

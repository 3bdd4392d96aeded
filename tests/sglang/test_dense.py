"""Dense Qwen3 on one real node, started past a stolen port; and what the server makes of adapters that we refuse."""

import json
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from longstraw_core.rollout import sglang_server
from longstraw_core.rollout.adapter_rules import read_adapter_config
from longstraw_core.rollout.reply import read_reply, request_body
from longstraw_core.rollout.served_adapter import write_served_adapter
from longstraw_core.rollout.served_model import write_served_model
from longstraw_core.rollout.server_command import ServedPolicy
from longstraw_core.rollout.server_process import ServerProcess
from longstraw_core.rollout.sglang_client import ConnectionLost, SglangClient
from longstraw_core.rollout.sglang_sampler import probe
from longstraw_core.rollout.sglang_server import SglangServer
from longstraw_core.spec import Retryable, Rollout, SpecError
from longstraw_core.spec.transaction import ServerSpec
from tests.support.processes import descendants, still_living
from tests.support.sglang.cpu import ARGUMENTS, LORA_ARGUMENTS, SMALL
from tests.support.sglang.dense import adapted, write_dense_model
from tests.support.sglang.oracle import largest_difference, prompt_of, wanted

TOLERANCE = 1e-4
SETTINGS = ServerSpec(arguments=(*ARGUMENTS, *LORA_ARGUMENTS), **SMALL)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass
class Served:
    client: SglangClient
    snapshot: Path
    policy: ServedPolicy
    model: PeftModel
    repeated: list[str]
    """Why the launch was repeated."""


def load(snapshot: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)


@pytest.fixture(scope="module")
def served(
    untrained_snapshot: Path, tmp_path_factory: pytest.TempPathFactory, cpu_environment: pytest.MonkeyPatch
) -> Iterator[Served]:
    """A server whose first launch finds its port taken by a program that came after the choice of the port."""
    directory = tmp_path_factory.mktemp("dense")
    snapshot = write_dense_model(directory / "snapshot", untrained_snapshot)
    model = adapted(load(snapshot))
    model.save_pretrained(directory / "adapter")
    write_served_adapter(directory / "adapter", snapshot, directory / "served")
    policy = ServedPolicy(
        write_served_model(snapshot, directory / "model", None), directory / "served", "float32", positions=256
    )
    thieves: list[socket.socket] = []

    def too_late(command: list[str], log: Path, *, rank: int) -> ServerProcess:
        if not thieves:
            thieves.append(socket.create_server(("127.0.0.1", int(command[command.index("--port") + 1]))))
        return ServerProcess(command, log, rank=rank)

    repeated: list[str] = []
    server = SglangServer(policy, SETTINGS, seed=1, logs=directory / "logs", connections=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_server, "ServerProcess", too_late)
        patch.setattr("longstraw_core.rollout.sglang_client.HEALTH_SECONDS", 2.0)  # a thief never answers
        try:
            server.launch(repeated.append)
            started = descendants()
            yield Served(server.client, snapshot, policy, model, repeated)
        finally:
            server.stop()
            thieves[0].close()
    assert len(started) >= 4  # launcher, scheduler, detokenizer, guard
    assert not still_living(started)


def sample(served: Served, length: int, **fields: Any) -> Rollout:
    return served.client.sample(wanted(prompt_of(length), **fields), timeout_seconds=120.0)


def test_a_port_that_is_taken_while_the_server_starts_leads_to_another_launch(served: Served) -> None:
    (reason,) = served.repeated
    assert "rank 0 ended" in reason
    assert "address already in use" in reason


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("length", [1, 200])
def test_logprobs_with_the_adapter_are_those_of_transformers_and_peft(
    served: Served, length: int, temperature: float
) -> None:
    rollout = sample(served, length, temperature=temperature)
    assert largest_difference(served.model, [rollout]) < TOLERANCE
    assert largest_difference(served.model, [rollout], adapter=False) > 0.05


def test_logprobs_without_the_adapter_are_those_of_transformers(served: Served) -> None:
    assert largest_difference(served.model, [sample(served, 200, adapter=False)], adapter=False) < TOLERANCE


def test_a_port_that_a_running_server_has_is_refused_and_that_server_goes_on(served: Served, tmp_path: Path) -> None:
    port = int(served.client.url.rpartition(":")[2])
    second = SglangServer(served.policy, SETTINGS.model_copy(update={"port": port}), seed=1, logs=tmp_path)
    with pytest.raises(Retryable, match=f"port {port} of this machine is taken"):
        second.__enter__()
    assert sample(served, 5).token_ids


def post(served: Served, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310 - loopback
        served.client.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120.0) as response:  # noqa: S310
        return json.loads(response.read())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("use_rslora", {"use_rslora": True}),
        ("alpha_pattern", {"alpha_pattern": {"v_proj": 64}}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
    ],
)
def test_what_the_server_would_misread_without_a_word_is_refused(
    served: Served, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    model = adapted(load(served.snapshot), ATTENTION, **fields)
    model.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=f"{name} is set, and SGLang would not honour it"):
        read_adapter_config(tmp_path)
    assert post(served, "/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path)})["success"]
    question = wanted(prompt_of(60))
    reply = post(served, "/generate", {**request_body(question, name), "lora_path": name})
    assert largest_difference(model, [read_reply(question, reply)]) > 0.05
    post(served, "/unload_lora_adapter", {"lora_name": name})


@pytest.mark.parametrize(
    ("targets", "fields", "message"),
    [(ATTENTION, {"use_dora": True}, "use_dora"), (r".*\.(q|k|v|o)_proj", {}, "is the pattern")],
    ids=["DoRA", "a pattern"],
)
def test_what_the_server_refuses_is_refused_before_it_starts(
    served: Served, tmp_path: Path, targets: Any, fields: dict[str, Any], message: str
) -> None:
    adapted(load(served.snapshot), targets, **fields).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=message):
        read_adapter_config(tmp_path)
    with pytest.raises(HTTPError) as refused:
        post(served, "/load_lora_adapter", {"lora_name": "refused", "lora_path": str(tmp_path)})
    refused.value.close()
    assert refused.value.code == 400
    assert sample(served, 5).token_ids


def test_an_adapter_that_the_server_dies_of_shows_at_the_probe_and_leaves_nothing(
    served: Served, tmp_path: Path
) -> None:
    """The adapter as PEFT writes it, without the neighbours that `write_served_adapter` adds."""
    adapted(load(served.snapshot), ("k_proj", "v_proj")).save_pretrained(tmp_path / "adapter")
    policy = ServedPolicy(served.policy.model, tmp_path / "adapter", "float32", positions=256)
    before = {process.pid for process in descendants()}
    with SglangServer(policy, SETTINGS, seed=1, logs=tmp_path / "logs") as server:
        started = [process for process in descendants() if process.pid not in before]
        with pytest.raises(ConnectionLost, match="probe of one token") as caught:
            probe(server.client, wanted(prompt_of(5)))
        assert "did not match any target module in ['qkv_proj']" in str(server.explain(caught.value))
    assert len(started) >= 4
    assert not still_living(started)

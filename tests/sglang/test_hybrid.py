"""The hybrid with its adapter on the real server: log-probabilities, seeds, limits, refusals, and the fake's shape."""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from longstraw_core.rollout.process_session import session_processes
from longstraw_core.rollout.reply import request_body
from longstraw_core.rollout.served_adapter import write_served_adapter
from longstraw_core.rollout.served_model import write_served_model
from longstraw_core.rollout.server_command import ServedPolicy
from longstraw_core.rollout.sglang_client import SglangClient
from longstraw_core.rollout.sglang_sampler import probe, sample_groups
from longstraw_core.rollout.sglang_server import SglangServer
from longstraw_core.spec import Rollout, StageFailed
from longstraw_core.spec.transaction import SamplingSpec, ServerSpec
from tests.support.sglang.cpu import ARGUMENTS, HYBRID_ARGUMENTS, LORA_ARGUMENTS, SMALL
from tests.support.sglang.fake.sglang.launch_server import State, generate
from tests.support.sglang.oracle import hybrid_adapter, largest_difference, prompt_of, wanted

TOLERANCE = 1e-4


@dataclass
class Served:
    client: SglangClient
    model: PeftModel
    server: SglangServer


@pytest.fixture(scope="module")
def served(
    untrained_snapshot: Path, tmp_path_factory: pytest.TempPathFactory, cpu_environment: pytest.MonkeyPatch
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("hybrid")
    model = hybrid_adapter(untrained_snapshot, directory / "adapter")
    write_served_adapter(directory / "adapter", untrained_snapshot, directory / "served")
    settings = ServerSpec(arguments=(*ARGUMENTS, *HYBRID_ARGUMENTS, *LORA_ARGUMENTS), context_length=2048, **SMALL)
    policy = ServedPolicy(
        write_served_model(untrained_snapshot, directory / "model", None), directory / "served", "float32", 65536
    )
    with SglangServer(policy, settings, seed=1, logs=directory / "logs", connections=16) as server:
        yield Served(server.client, model, server)
    assert not any(session_processes(rank.session) for rank in server._ranks)


def sample(served: Served, length: int, **fields: Any) -> Rollout:
    return served.client.sample(wanted(prompt_of(length), **fields), timeout_seconds=120.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("length", [1, 70, 300])
def test_logprobs_with_the_adapter_are_those_of_peft(served: Served, length: int, temperature: float) -> None:
    rollout = sample(served, length, temperature=temperature)
    assert largest_difference(served.model, [rollout]) < TOLERANCE
    assert largest_difference(served.model, [rollout], adapter=False) > 0.05


def test_logprobs_without_the_adapter_are_those_of_the_base(served: Served) -> None:
    rollout = sample(served, 70, adapter=False)
    assert largest_difference(served.model, [rollout], adapter=False) < TOLERANCE


def test_a_seed_decides_a_response_whatever_else_is_sampled_beside_it(served: Served) -> None:
    alone = sample(served, 40, seed=2**62 + 5)
    groups = [[wanted(prompt_of(length, f"p{length}"), index, seed=index) for index in range(6)] for length in (30, 50)]
    groups += [[wanted(prompt_of(40, "again"), 0, seed=2**62 + 5)]]
    found: dict[str, list[Rollout]] = {}
    sample_groups(
        served.client, groups, SamplingSpec(engine="sglang", concurrent_requests=8), finished=found.__setitem__
    )
    assert found["again"][0].token_ids == alone.token_ids
    for length in (30, 50):
        group = found[f"p{length}"]
        assert [rollout.index for rollout in group] == list(range(6))
        assert len({rollout.token_ids for rollout in group}) == 6
        assert largest_difference(served.model, group) < TOLERANCE


def test_an_end_token_stops_a_response_and_is_kept(served: Served) -> None:
    ends = {388, *range(0, 500, 3)}
    rollout = sample(served, 30, end_tokens=tuple(sorted(ends)), max_tokens=64)
    assert rollout.finish_reason == "stop"
    assert rollout.token_ids[-1] in ends
    assert not ends & set(rollout.token_ids[:-1])
    assert largest_difference(served.model, [rollout]) < TOLERANCE


def test_a_response_that_takes_too_long_is_aborted_and_keeps_what_was_sampled(served: Served) -> None:
    rollouts = (
        served.client.sample(wanted(prompt_of(20), max_tokens=2000, seed=seed), timeout_seconds=1.5)
        for seed in range(20)
    )
    rollout = next(rollout for rollout in rollouts if rollout.finish_reason != "stop")  # some end by themselves before
    assert rollout.finish_reason == "abort"
    assert rollout.truncated
    assert 1 <= len(rollout.token_ids) < 2000
    assert largest_difference(served.model, [rollout]) < TOLERANCE


def test_a_prompt_above_the_context_is_refused_and_never_cut(served: Served) -> None:
    with pytest.raises(StageFailed, match=r"response p0\[0\]: the server refused with HTTP 400.*2048"):
        sample(served, 2045)
    assert sample(served, 10).token_ids


def test_the_probe_takes_one_token(served: Served) -> None:
    probe(served.client, wanted(prompt_of(5)))


def test_the_reply_has_the_shape_that_the_fake_server_gives(served: Served, untrained_snapshot: Path) -> None:
    body = request_body(wanted(prompt_of(9), max_tokens=3), "shape")
    request = urllib.request.Request(  # noqa: S310 - loopback
        f"{served.client.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        real = json.loads(response.read())
    arguments = type("Arguments", (), {"lora_paths": ["policy=x"], "context_length": 2048})()
    arguments.model_path = str(untrained_snapshot)
    _, fake = generate(State(arguments), body)
    assert shape(fake) == shape({**real, "meta_info": {key: real["meta_info"].get(key) for key in fake["meta_info"]}})
    # what the real one says beyond that is known, so that a new release shows here
    assert set(real) - set(fake) == set()
    assert set(real["meta_info"]) - set(fake["meta_info"]) == {"response_sent_to_client_ts"}


def shape(value: Any) -> Any:
    """The kinds of values in a reply; numbers of either kind are one kind, and a list is what its first entry is."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__

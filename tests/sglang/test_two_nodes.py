"""Two nodes on one machine, and dense Qwen3: tensor and pipeline parallel ranks, YaRN, each against transformers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw_core.rollout.process_session import session_processes
from longstraw_core.rollout.served_adapter import write_served_adapter
from longstraw_core.rollout.served_model import write_served_model
from longstraw_core.rollout.server_command import ServedPolicy
from longstraw_core.rollout.sglang_client import SglangClient
from longstraw_core.rollout.sglang_sampler import sample_groups
from longstraw_core.rollout.sglang_server import SglangServer
from longstraw_core.spec import Rollout
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.spec.transaction import SamplingSpec, ServerSpec
from tests.support.sglang.cpu import ARGUMENTS, LORA_ARGUMENTS, SMALL
from tests.support.sglang.dense import adapted, write_dense_model
from tests.support.sglang.oracle import largest_difference, prompt_of, wanted

TOLERANCE = 1e-4
YARN = YarnScaling(type="yarn", factor=4.0, original_positions=256)


@dataclass
class Pair:
    client: SglangClient
    model: PeftModel
    unscaled: PeftModel
    """The same weights with the positions the snapshot has."""


@pytest.fixture(
    scope="module",
    params=[{"tensor_parallel": 2}, {"pipeline_parallel": 2}],
    ids=["two tensor ranks", "two pipeline ranks"],
)
def pair(
    request: pytest.FixtureRequest,
    untrained_snapshot: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_environment: pytest.MonkeyPatch,
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("dense")
    snapshot = write_dense_model(directory / "snapshot", untrained_snapshot)
    served_model = write_served_model(snapshot, directory / "model", YARN)
    model = adapted(AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32))
    unscaled = adapted(AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32))
    model.save_pretrained(directory / "adapter")
    config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "up_proj", "v_proj"]
    write_served_adapter(directory / "adapter", snapshot, directory / "served")
    settings = ServerSpec(nodes=2, arguments=(*ARGUMENTS, *LORA_ARGUMENTS), **SMALL, **request.param)
    policy = ServedPolicy(served_model, directory / "served", "float32", YARN.positions)
    with SglangServer(policy, settings, seed=1, logs=directory / "logs", connections=16) as server:
        assert len(server.logs) == 2
        yield Pair(server.client, model, unscaled)
    assert not any(session_processes(rank.session) for rank in server._ranks)


def sample(pair: Pair, length: int, **fields: Any) -> Rollout:
    return pair.client.sample(wanted(prompt_of(length), **fields), timeout_seconds=120.0)


def test_the_configuration_that_is_served_is_scaled(pair: Pair) -> None:
    served = AutoConfig.from_pretrained(pair.client.server_info()["model_path"])
    assert served.max_position_embeddings == 1024
    assert served.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("length", [9, 700])
def test_logprobs_with_adapter_and_yarn_are_those_of_transformers_and_peft(pair: Pair, length: int) -> None:
    rollout = sample(pair, length)
    assert largest_difference(pair.model, [rollout]) < TOLERANCE
    assert largest_difference(pair.model, [rollout], adapter=False) > 0.05


def test_without_yarn_they_would_be_others(pair: Pair) -> None:
    assert largest_difference(pair.unscaled, [sample(pair, 700)]) > 0.1


def test_logprobs_without_the_adapter_are_those_of_the_base(pair: Pair) -> None:
    assert largest_difference(pair.model, [sample(pair, 300, adapter=False)], adapter=False) < TOLERANCE


def test_seeds_hold_over_ranks_and_a_group_has_different_responses(pair: Pair) -> None:
    alone = sample(pair, 40, seed=3)
    found: dict[str, list[Rollout]] = {}
    groups = [[wanted(prompt_of(40, "group"), index, seed=index) for index in range(6)]]
    sampling = SamplingSpec(engine="sglang", concurrent_requests=6)
    sample_groups(pair.client, groups, sampling, finished=found.__setitem__)
    assert found["group"][3].token_ids == alone.token_ids
    assert len({rollout.token_ids for rollout in found["group"]}) == 6
    assert largest_difference(pair.model, found["group"]) < TOLERANCE

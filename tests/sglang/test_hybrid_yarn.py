"""The hybrid with YaRN and its adapter on the real server, whose prefix cache is on as it is by default."""

import json
import shutil
from pathlib import Path

import pytest

from longstraw_core.rollout.served_adapter import write_served_adapter
from longstraw_core.rollout.served_model import write_served_model
from longstraw_core.rollout.server_command import ServedPolicy
from longstraw_core.rollout.sglang_server import SglangServer
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.spec.transaction import ModelSpec, ServerSpec
from longstraw_core.training.model import load_policy_model
from tests.support.sglang.cpu import ARGUMENTS, HYBRID_ARGUMENTS, LORA_ARGUMENTS, SMALL
from tests.support.sglang.oracle import hybrid_adapter, largest_difference, prompt_of, wanted

YARN = YarnScaling(type="yarn", factor=4.0, original_positions=256)


def test_logprobs_beyond_the_models_own_positions_are_the_trainers(
    untrained_snapshot: Path, tmp_path: Path, cpu_environment: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(untrained_snapshot, snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    config["max_position_embeddings"] = YARN.original_positions
    config["rope_parameters"]["rope_theta"] = 10000.0
    (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
    unscaled = hybrid_adapter(snapshot, tmp_path / "adapter")
    write_served_adapter(tmp_path / "adapter", snapshot, tmp_path / "served")
    spec = ModelSpec(snapshot=str(snapshot), family="qwen3_5_text", dtype="float32", rope_scaling=YARN)
    scaled = load_policy_model(snapshot, tmp_path / "adapter", spec)
    words = (*(word for word in ARGUMENTS if word != "--disable-radix-cache"), *HYBRID_ARGUMENTS, *LORA_ARGUMENTS)
    settings = ServerSpec(arguments=words, **SMALL)
    model = write_served_model(snapshot, tmp_path / "model", YARN)
    policy = ServedPolicy(model, tmp_path / "served", "float32", YARN.positions)
    with SglangServer(policy, settings, seed=1, logs=tmp_path / "logs", connections=4) as server:
        rollouts = [
            server.client.sample(wanted(prompt_of(length), seed=seed), timeout_seconds=120.0)
            for length, seed in ((9, 0), (700, 1), (700, 2), (700, 3))
        ]
    assert largest_difference(scaled, rollouts) < 1e-4
    assert largest_difference(unscaled, rollouts) > 0.1
    assert len({rollout.token_ids for rollout in rollouts}) == 4

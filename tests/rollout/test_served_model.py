"""The directory that a server is started on: the snapshot's own files, and a configuration that it can serve."""

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rollout.served_model import served_config, write_served_model
from longstraw_core.spec import SpecError
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.spec.transaction import ModelSpec
from longstraw_core.training.model import load_base_model

YARN = YarnScaling(type="yarn", factor=2.0, original_positions=65536)


def text_config(snapshot: Path) -> dict[str, Any]:
    return json.loads((snapshot / "config.json").read_text())


def test_weights_and_tokenizer_are_the_snapshots_own_files(untrained_snapshot: Path, tmp_path: Path) -> None:
    directory = write_served_model(untrained_snapshot, tmp_path / "view", None)
    assert {entry.name for entry in directory.iterdir()} == {entry.name for entry in untrained_snapshot.iterdir()}
    for entry in directory.iterdir():
        if entry.name != "config.json":
            assert entry.samefile(untrained_snapshot / entry.name)


def test_a_text_model_is_described_as_the_text_part_of_its_multimodal_class(untrained_snapshot: Path) -> None:
    config = text_config(untrained_snapshot)
    served = served_config(config, None, "config.json")
    assert served["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert (served["model_type"], served["language_model_only"]) == ("qwen3_5", True)
    assert served["text_config"] == config | {"full_attention_interval": 2}
    assert served["tie_word_embeddings"] == config["tie_word_embeddings"]


def test_a_multimodal_snapshot_is_served_without_its_vision_part(untrained_snapshot: Path) -> None:
    wrapper = {"model_type": "qwen3_5", "architectures": ["X"], "text_config": text_config(untrained_snapshot)}
    served = served_config(wrapper | {"vision_config": {"depth": 3}}, YARN, "config.json")
    assert served["language_model_only"] is True
    assert served["architectures"] == ["X"]
    assert served["text_config"]["full_attention_interval"] == 2
    assert served["text_config"]["max_position_embeddings"] == 131072


def test_scaling_is_what_the_trainers_loader_writes(untrained_snapshot: Path) -> None:
    spec = ModelSpec(snapshot=str(untrained_snapshot), family="qwen3_5_text", dtype="float32", rope_scaling=YARN)
    trained = load_base_model(untrained_snapshot, spec).config
    served = served_config(text_config(untrained_snapshot), YARN, "config.json")["text_config"]
    assert served["rope_parameters"] == dict(trained.rope_parameters)
    assert served["max_position_embeddings"] == trained.max_position_embeddings


def test_an_older_configuration_states_theta_beside_the_scaling() -> None:
    config = {"model_type": "qwen3", "rope_theta": 5e5, "rope_scaling": None, "max_position_embeddings": 65536}
    served = served_config(config, YARN, "config.json")
    assert served["rope_parameters"]["rope_theta"] == 5e5
    assert served["rope_parameters"]["rope_type"] == "yarn"
    assert "rope_scaling" not in served
    assert served_config(config, None, "config.json") == config


@pytest.mark.parametrize(
    ("change", "scaling", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "linear_attention"]}, None, "one full attention layer"),
        ({"full_attention_interval": 3}, None, "one full attention layer in every n"),
        ({"layer_types": None}, None, "neither layer_types nor full_attention_interval"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, YARN, "already has rope type 'yarn'"),
        ({"rope_parameters": {}}, YARN, "no rope_theta"),
        ({"max_position_embeddings": 4096}, YARN, "original_positions is 65536"),
    ],
)
def test_what_cannot_be_served_is_refused(
    untrained_snapshot: Path, change: dict[str, Any], scaling: YarnScaling | None, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        served_config(text_config(untrained_snapshot) | change, scaling, "config.json")

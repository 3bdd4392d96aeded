"""A snapshot is complete and of the right family, or the message names what is wrong."""

import json
import shutil
from pathlib import Path

import pytest

from longstraw_core.spec import SpecError
from longstraw_core.stages.snapshot import check_snapshot


@pytest.fixture
def snapshot(untrained_snapshot: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untrained_snapshot, tmp_path / "model"))


def test_a_complete_snapshot_is_accepted(snapshot: Path) -> None:
    check_snapshot(snapshot, "qwen3_5_text")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_missing_file_is_named(snapshot: Path, name: str) -> None:
    (snapshot / name).unlink()
    with pytest.raises(SpecError, match=name.replace(".", r"\.")):
        check_snapshot(snapshot, "qwen3_5_text")


def test_a_missing_shard_of_an_index_is_named(snapshot: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    with pytest.raises(SpecError, match="model-00002-of-00002"):
        check_snapshot(snapshot, "qwen3_5_text")


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", '{"model_type": "llama"}', "[" * 50_000])
def test_a_config_that_is_no_model_of_the_family_is_refused(snapshot: Path, content: str) -> None:
    (snapshot / "config.json").write_text(content)
    with pytest.raises(SpecError, match=r"config\.json"):
        check_snapshot(snapshot, "qwen3_5_text")


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}'])
def test_a_broken_index_is_named(snapshot: Path, content: str) -> None:
    (snapshot / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SpecError, match=r"index\.json"):
        check_snapshot(snapshot, "qwen3_5_text")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors"])
def test_a_weight_file_outside_the_snapshot_is_refused(snapshot: Path, shard: str) -> None:
    (snapshot / "model.safetensors").rename(snapshot.parent / "outside.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(SpecError, match="outside the snapshot"):
        check_snapshot(snapshot, "qwen3_5_text")


@pytest.mark.parametrize("shard", [".hidden/model.safetensors", ".model.safetensors"])
def test_a_weight_file_under_a_hidden_name_is_refused_because_no_digest_would_cover_it(
    snapshot: Path, shard: str
) -> None:
    (snapshot / shard).parent.mkdir(exist_ok=True)
    (snapshot / "model.safetensors").rename(snapshot / shard)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(SpecError, match="begin with a dot"):
        check_snapshot(snapshot, "qwen3_5_text")


def test_an_index_without_weight_files_is_refused(snapshot: Path) -> None:
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(SpecError, match="names no weight file"):
        check_snapshot(snapshot, "qwen3_5_text")

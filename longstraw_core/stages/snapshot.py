"""Checks that a model snapshot directory is complete and of the right family, without reading its weights."""

import json
from pathlib import Path
from typing import Any

from longstraw_core.spec import SpecError

_REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json")
_MODEL_TYPES = {"qwen3_5_text": ("qwen3_5_text",), "glm_moe_dsa": ("glm_moe_dsa",)}


def read_snapshot_config(snapshot: Path) -> dict[str, Any]:
    """Return `config.json` of a snapshot; raise SpecError when it is missing or not a JSON object."""
    path = snapshot / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecError(f"model.snapshot: {path} is missing; point at a Hugging Face snapshot directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"model.snapshot: {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"model.snapshot: {path} must hold a JSON object")
    return config


def check_snapshot(snapshot: Path, family: str) -> None:
    """Check that every file a stage will load is there and that the model is of `family`.

    Raises:
        SpecError: naming the file that is missing, or the model type that was found.
    """
    if not snapshot.is_dir():
        raise SpecError(f"model.snapshot: {snapshot} is not a directory")
    for name in _REQUIRED:
        if not (snapshot / name).is_file():
            raise SpecError(f"model.snapshot: {snapshot / name} is missing; point at a complete Hugging Face snapshot")
    model_type = read_snapshot_config(snapshot).get("model_type")
    if model_type not in _MODEL_TYPES[family]:
        raise SpecError(
            f"model.family: {family} cannot be loaded from {snapshot}: its config.json has model_type {model_type!r}, "
            f"expected {' or '.join(_MODEL_TYPES[family])}"
        )
    index = snapshot / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise SpecError(f"model.snapshot: {index} is not a safetensors index: {error}") from error
    for shard in shards:
        if not (snapshot / str(shard)).is_file():
            raise SpecError(f"model.snapshot: weight file {snapshot / str(shard)} is missing; download it again")

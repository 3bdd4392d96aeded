"""Checks that a model snapshot directory is complete and of the right family, without reading its weights."""

import json
from pathlib import Path
from typing import Any

from longstraw_core.spec import SpecError
from longstraw_core.spec.descriptors import check_relative_path

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json")
_MODEL_TYPES = {"qwen3_5_text": ("qwen3_5_text", "qwen3_5"), "glm_moe_dsa": ("glm_moe_dsa",)}
"""`qwen3_5` is the multimodal wrapper, whose text model is loaded."""


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
    check_snapshot_files(snapshot)
    model_type = read_snapshot_config(snapshot).get("model_type")
    if model_type not in _MODEL_TYPES[family]:
        raise SpecError(
            f"model.family: {family} cannot be loaded from {snapshot}: its config.json has model_type {model_type!r}, "
            f"expected {' or '.join(_MODEL_TYPES[family])}"
        )


def check_snapshot_files(snapshot: Path) -> None:
    """Check that a directory is a complete Hugging Face snapshot: configuration, tokenizer, every weight file.

    Raises:
        SpecError: naming the file that is missing.
    """
    if not snapshot.is_dir():
        raise SpecError(f"model.snapshot: {snapshot} is not a directory")
    for name in _REQUIRED:
        if not (snapshot / name).is_file():
            raise SpecError(f"model.snapshot: {snapshot / name} is missing; point at a complete Hugging Face snapshot")
    index = snapshot / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise SpecError(f"model.snapshot: {index} is not a safetensors index: {error}") from error
        if not shards:
            raise SpecError(f"model.snapshot: {index} names no weight file; download it again")
    for shard in shards:
        try:
            check_relative_path(str(shard))
        except ValueError as error:
            raise SpecError(f"model.snapshot: {index} names a weight file outside the snapshot: {error}") from error
        if any(part.startswith(".") for part in str(shard).split("/")):
            raise SpecError(
                f"model.snapshot: {index} names weight file {shard}; names that begin with a dot are no part of a "
                "snapshot: rename it"
            )
        _check_weight_file(snapshot / str(shard))


def _check_weight_file(path: Path) -> None:
    """Check that a safetensors file is as long as its header says, without reading its tensors.

    Format: 8 bytes little-endian header length, the header as JSON, then the tensors at `data_offsets`.
    """
    if not path.is_file():
        raise SpecError(f"model.snapshot: weight file {path} is missing; download it again")
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= MAX_SAFETENSORS_HEADER_BYTES:
                raise ValueError(f"header length {header_bytes}")
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
        observed = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SpecError(
            f"model.snapshot: {path} is not a safetensors file ({type(error).__name__}: {error}); download it again"
        ) from error
    if observed != expected:
        raise SpecError(f"model.snapshot: {path} has {observed} bytes, its header says {expected}; download it again")

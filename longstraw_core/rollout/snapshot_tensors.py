"""Finds the tensors of a model snapshot by the layer they belong to, whatever wrapper their names stand in."""

import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from longstraw_core.spec import IntegrityError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LAYER = re.compile(r"(?:^|\.)(layers\.[0-9]+\..+)$")
_OTHER_TOWERS = frozenset({"mtp", "visual", "vision_tower", "audio_tower"})


def layer_key(name: str) -> str | None:
    """Return `layers.<n>.<rest>` of a tensor or module name; None outside the decoder layers of the language model.

    `model.layers.3.mlp.up_proj`, `model.language_model.layers.3.mlp.up_proj` and PEFT's
    `base_model.model.model.layers.3.mlp.up_proj` are the same module.
    """
    match = _LAYER.search(name)
    if match is None or _OTHER_TOWERS & set(name[: match.start(1)].split(".")):
        return None
    return match[1]


def shard_names(snapshot: Path) -> list[str]:
    """File names of a snapshot's weights, sorted.

    Raises:
        IntegrityError: the index cannot be read.
    """
    index = snapshot / INDEX_NAME
    if not index.is_file():
        return [SINGLE_NAME]
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{index}: not a safetensors index: {error}") from error


def layer_shapes(snapshot: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the decoder layers, by `layer_key`; reads headers only.

    Raises:
        IntegrityError: a file is not a safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shard_names(snapshot):
        path = snapshot / shard
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    key = layer_key(name)
                    if key is not None:
                        shapes[key] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise IntegrityError(f"{path}: not a readable safetensors file: {error}") from error
    return shapes

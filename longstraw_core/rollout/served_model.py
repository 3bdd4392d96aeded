"""The model directory that SGLang 0.5.23 is started on: the snapshot's files, with a configuration it can serve.

The weights are the snapshot's own, by link. `config.json` differs where the server needs it to:
* A Qwen3.5 text model is described as the text part of its multimodal class, without a vision part: only that class
  knows the sizes of its LoRA modules. A multimodal snapshot is served without its vision part.
* `full_attention_interval`, which transformers does not write, is derived from `layer_types`.
* `model.rope_scaling` is written as the trainer's loader writes it, so that both compute the same rotary angles.
"""

import json
from pathlib import Path
from typing import Any

from longstraw_core.spec import SpecError
from longstraw_core.spec.positions import YarnScaling, allowed_positions

_MULTIMODAL_CLASS = "Qwen3_5ForConditionalGeneration"


def write_served_model(snapshot: Path, destination: Path, scaling: YarnScaling | None) -> Path:
    """Create `destination`, which must not exist, and return the directory to serve.

    Raises:
        SpecError: the configuration cannot be read, describes layers in no fixed interval, or is scaled already.
    """
    path = snapshot / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError(f"model.snapshot: {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"model.snapshot: {path} must hold a JSON object")
    served = served_config(config, scaling, str(path))
    destination.mkdir(parents=True)
    for entry in sorted(snapshot.iterdir()):
        if entry.name != "config.json":
            (destination / entry.name).symlink_to(entry.resolve())
    (destination / "config.json").write_text(json.dumps(served, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return destination


def served_config(config: dict[str, Any], scaling: YarnScaling | None, where: str) -> dict[str, Any]:
    """Return the configuration to serve; the argument is left as it is.

    Raises:
        SpecError: see `write_served_model`.
    """
    model_type = config.get("model_type")
    text = dict(config.get("text_config", config))
    if scaling is not None:
        _scale_positions(text, scaling, where)
    if model_type in ("qwen3_5", "qwen3_5_text"):
        text["full_attention_interval"] = _attention_interval(text, where)
    if model_type == "qwen3_5_text":
        shared = {key: text[key] for key in ("dtype", "eos_token_id", "pad_token_id", "bos_token_id") if key in text}
        return shared | {
            "architectures": [_MULTIMODAL_CLASS],
            "language_model_only": True,
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
            "vision_config": {},
        }
    if model_type == "qwen3_5":
        return config | {"language_model_only": True, "text_config": text}
    return config | {"text_config": text} if "text_config" in config else text


def _attention_interval(text: dict[str, Any], where: str) -> int:
    """Return n where every n-th layer has full attention."""
    kinds = text.get("layer_types")
    stated = text.get("full_attention_interval")
    if kinds is None:
        if isinstance(stated, int) and stated > 0:
            return stated
        raise SpecError(f"model.snapshot: {where} has neither layer_types nor full_attention_interval")
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    interval = full[0] + 1 if full else len(kinds) + 1
    expected = [
        "full_attention" if (number + 1) % interval == 0 else "linear_attention" for number in range(len(kinds))
    ]
    if list(kinds) != expected or (stated is not None and stated != interval):
        raise SpecError(
            f"model.snapshot: {where}: layer_types are not one full attention layer in every n; SGLang serves no other "
            "order, use sampling.engine transformers"
        )
    return interval


def _scale_positions(text: dict[str, Any], scaling: YarnScaling, where: str) -> None:
    rope: dict[str, Any] = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise SpecError(f"model.rope_scaling: {where} already has rope type {kind!r}; remove model.rope_scaling")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in rope and text.get(name) is not None:
            rope[name] = text[name]
    if "rope_theta" not in rope:
        raise SpecError(f"model.rope_scaling: {where} states no rope_theta to scale")
    text["rope_parameters"] = rope | {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    text.pop("rope_scaling", None)
    text["max_position_embeddings"] = allowed_positions(int(text["max_position_embeddings"]), scaling)

"""Which LoRA adapters SGLang 0.5.23 serves as they are meant; every other one is refused before a server starts.

Several features are ignored by the server without a word, or end it at the first request. Each is named here; what
can be expressed in the server's own names is rewritten by `longstraw_core.rollout.served_adapter` instead.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import LoraSpec

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

FUSED_PROJECTIONS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Projections that the server computes as one: it needs all of a group or none, and dies where the first is missing."""

SERVED_TARGETS = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    }
)
"""Names, as PEFT writes them, that can be served."""

_PRESETS: dict[str, dict[str, tuple[str, ...]]] = {
    "qwen3_5_text": dict.fromkeys(("attention", "attention+mlp", "all"), ("in_proj_a", "in_proj_b")),
    "glm_moe_dsa": {"all": ("experts.down_proj", "experts.gate_up_proj")},
}
"""What presets of `lora.targets` have that cannot be served, by family."""

UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("use_rslora", "the server scales by lora_alpha / r, never by lora_alpha / sqrt(r)"),
    ("alpha_pattern", "the server gives every module the same lora_alpha"),
    ("rank_pattern", "the server gives every module the same rank"),
    ("use_dora", "the server has no magnitude vectors"),
    ("use_qalora", "the server knows plain LoRA only"),
    ("modules_to_save", "the server does not load whole modules from an adapter"),
    ("trainable_token_indices", "the server does not load token embeddings from an adapter"),
    ("lora_bias", "the server does not load biases from an adapter"),
    ("layer_replication", "the server keeps the base model's layers"),
    ("alora_invocation_tokens", "the server applies an adapter to a whole request"),
    ("fan_in_fan_out", "the server expects lora_A and lora_B of linear modules"),
    ("exclude_modules", "the server adapts every module that target_modules names"),
    ("megatron_config", "the server knows plain LoRA only"),
)
"""Fields of an adapter's configuration that must be unset, and why."""


def check_served_targets(targets: Iterable[str], where: str) -> None:
    """Refuse target names that SGLang cannot adapt.

    Args:
        targets: module names as PEFT writes them, and `experts.*` for parameters of routed experts.
        where: beginning of the message: the field or file that names them.

    Raises:
        SpecError: naming all of them, and what to do.
    """
    names = sorted(set(targets))
    refused = [name for name in names if name.removeprefix("mlp.") not in SERVED_TARGETS]
    if not refused:
        return
    served = ", ".join(name for name in names if name not in refused)
    remedy = f"leave them out (lora.targets: [{served}])" if served else "choose other targets"
    raise SpecError(
        f"{where}: SGLang cannot serve an adapter of {', '.join(refused)}; {remedy}, or set sampling.server.merge: true"
    )


def check_lora_before_start(lora: LoraSpec, family: str) -> None:
    """Refuse targets that SGLang cannot adapt by the specification alone.

    Raises:
        SpecError: see `check_served_targets`.
    """
    if not isinstance(lora.targets, str):
        check_served_targets(lora.targets, "lora.targets")
        return
    refused = _PRESETS.get(family, {}).get(lora.targets)
    if refused:
        raise SpecError(
            f"lora.targets: {lora.targets} has {', '.join(refused)}, which SGLang cannot serve as an adapter; list "
            "module names without them, or set sampling.server.merge: true"
        )


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """Return a PEFT `adapter_config.json` that can be served.

    Raises:
        SpecError: unreadable, not LoRA, or with a feature that the server ignores or dies of; names it.
    """
    path = adapter / CONFIG_NAME
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: no readable adapter configuration: {error}") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise SpecError(f"{path}: not a LoRA adapter; only LoRA adapters are served")
    check_adapter_config(fields, str(path))
    return fields


def check_adapter_config(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration that SGLang would misread.

    Raises:
        SpecError: see `read_adapter_config`.
    """
    for key, reason in UNSUPPORTED:
        if fields.get(key):
            raise SpecError(f"{where}: {key} is set, and SGLang would not honour it ({reason}); remove it")
    if fields.get("bias", "none") != "none":
        raise SpecError(f"{where}: bias is {fields['bias']!r}, and SGLang loads no biases from an adapter; use 'none'")
    targets = fields.get("target_modules")
    if isinstance(targets, str):
        raise SpecError(f"{where}: target_modules is the pattern {targets!r}; SGLang needs a list of module names")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise SpecError(f"{where}: target_modules must be a list of module names")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not _is_positive_number(alpha):
        raise SpecError(f"{where}: r and lora_alpha must be positive numbers")
    names = [name.rsplit(".", 1)[-1] for name in targets]
    check_served_targets([*names, *(fields.get("target_parameters") or [])], where)
    if not names:
        raise SpecError(f"{where}: target_modules is empty; there is nothing to serve")


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf

"""Finds the family of a Hugging Face model: the one place that knows all of them."""

from typing import Any

from longstraw_core.mixers.family import Family
from longstraw_core.mixers.glm_moe_dsa import GlmFamily
from longstraw_core.mixers.qwen3_5 import Qwen35Family
from longstraw_core.spec.errors import SpecError

FAMILIES = {"qwen3_5_text": Qwen35Family, "qwen3_5": Qwen35Family, "glm_moe_dsa": GlmFamily}


def bind_family(model: Any, *, page_tokens: int) -> Family:
    """Bind a Hugging Face causal language model to its family.

    Raises:
        SpecError: the model type, a layer type or the rope type is not supported.
    """
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise SpecError(f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type](model, page_tokens=page_tokens)

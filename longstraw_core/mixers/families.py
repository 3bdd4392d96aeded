"""Finds the family of a Hugging Face model: the one place that knows all of them."""

from typing import Any

from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.family import Family
from longstraw_core.mixers.glm_moe_dsa import GlmFamily
from longstraw_core.mixers.qwen3_5 import Qwen35Family
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.transaction import SelectionRecord

FAMILIES = ("qwen3_5_text", "qwen3_5", "glm_moe_dsa")


def bind_family(
    model: Any,
    *,
    page_tokens: int,
    selection_record: SelectionRecord = "cut",
    context: RankGroup = ALONE,
    experts: RankGroup = ALONE,
) -> Family:
    """Bind a Hugging Face causal language model to its family.

    Args:
        model: the model; PEFT may have wrapped its modules.
        page_tokens: tokens per resident page.
        selection_record: what is kept of the selections of sparse attention for the reverse sweep.
        context: the ranks that share the tokens of every prompt and response.
        experts: the ranks that share the experts.

    Raises:
        SpecError: the model type, a layer type, the rope type or a number of ranks is not supported.
    """
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise SpecError(f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    if model_type == "glm_moe_dsa":
        return GlmFamily(
            model, page_tokens=page_tokens, selection_record=selection_record, context=context, experts=experts
        )
    if experts.size > 1:
        raise SpecError(f"expert parallel size {experts.size}: this model has no experts; choose 1")
    return Qwen35Family(model, page_tokens=page_tokens, context=context)

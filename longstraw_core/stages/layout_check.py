"""Whether a model can be divided over the ranks of a layout, from its `config.json` alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import LayoutSpec
from longstraw_core.stages.snapshot import read_snapshot_config


def check_layout(snapshot: Path, family: str, layout: LayoutSpec) -> None:
    """Refuse a layout that the engine would refuse when it binds the model, before anything is sampled or loaded.

    A size that `config.json` leaves out is not judged here.

    Raises:
        SpecError: naming the field of the layout and the sizes it does not fit.
    """
    config = read_snapshot_config(snapshot)
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise SpecError(f"model.snapshot: {snapshot / 'config.json'}: text_config must be a JSON object")
    if family == "qwen3_5_text":
        if layout.expert_parallel > 1:
            raise SpecError(
                f"layout.expert_parallel: {layout.expert_parallel} ranks would share experts, and {family} has none; "
                "use 1"
            )
        if "linear_attention" in text.get("layer_types", ["linear_attention"]):
            _check_heads(text, layout.context_parallel)
    experts = text.get("n_routed_experts")
    if isinstance(experts, int) and experts % layout.expert_parallel:
        raise SpecError(
            f"layout.expert_parallel: {layout.expert_parallel} does not divide the model's {experts} experts; "
            "choose a divisor"
        )


def _check_heads(text: Mapping[str, Any], ranks: int) -> None:
    """Gated delta nets are divided by value heads; a rank's value heads need whole key heads, or one shared by all."""
    values, keys = text.get("linear_num_value_heads"), text.get("linear_num_key_heads")
    if isinstance(values, int) and values % ranks:
        raise SpecError(
            f"layout.context_parallel: {ranks} does not divide the {values} value heads of the linear attention "
            "layers; choose a divisor"
        )
    if isinstance(keys, int) and keys > 0 and keys % ranks and ranks % keys:
        raise SpecError(
            f"layout.context_parallel: {ranks} neither divides the {keys} key heads of the linear attention layers "
            "nor is a multiple of them; choose another"
        )

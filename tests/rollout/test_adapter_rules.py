"""What SGLang would misread is refused in one line that names it."""

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rollout.adapter_rules import (
    check_adapter_config,
    check_lora_before_start,
    check_served_targets,
    read_adapter_config,
)
from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import LoraSpec
from longstraw_core.training.lora import PRESETS

GOOD: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "in_proj_qkv"]}


def test_a_plain_adapter_passes() -> None:
    check_adapter_config(GOOD, "here")
    check_adapter_config(
        GOOD | {"use_rslora": False, "alpha_pattern": {}, "modules_to_save": None, "bias": "none"}, "x"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_rslora": True}, "use_rslora is set, and SGLang would not honour it"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_modules": r".*\.q_proj"}, "is the pattern"),
        ({"target_modules": "all-linear"}, "is the pattern"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": None}, "must be a list"),
        (
            {"target_modules": ["q_proj", "in_proj_a", "in_proj_b"]},
            "an adapter of in_proj_a, in_proj_b; leave them out",
        ),
        ({"target_modules": ["indexer.wq_b"]}, "an adapter of wq_b"),
        ({"target_modules": ["lm_head"]}, "an adapter of lm_head"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "mlp.experts.gate_up_proj.*merge: true"),
        ({"r": None}, "r and lora_alpha must be positive numbers"),
        ({"r": 0}, "r and lora_alpha must be positive numbers"),
        ({"r": True}, "r and lora_alpha must be positive numbers"),
        ({"lora_alpha": float("nan")}, "r and lora_alpha must be positive numbers"),
        ({"lora_alpha": float("inf")}, "r and lora_alpha must be positive numbers"),
    ],
)
def test_each_feature_that_would_be_misread_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        check_adapter_config(GOOD | change, "adapter_config.json")
    assert str(caught.value).startswith("adapter_config.json: ")
    assert "\n" not in str(caught.value)


def test_other_kinds_of_adapters_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no readable adapter configuration"):
        read_adapter_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(GOOD | {"peft_type": "IA3"}), encoding="utf-8")
    with pytest.raises(SpecError, match="only LoRA"):
        read_adapter_config(tmp_path)


def test_the_message_lists_what_can_be_served() -> None:
    with pytest.raises(SpecError, match=r"lora.targets: \[o_proj, q_proj\]"):
        check_served_targets(["q_proj", "in_proj_b", "o_proj"], "lora.targets")


@pytest.mark.parametrize(
    ("family", "available"),
    [
        ("qwen3_5_text", [name for name in PRESETS["all"] if "experts" not in name and "a_proj" not in name]),
        ("glm_moe_dsa", [name for name in PRESETS["all"] if not name.startswith("in_proj") and name != "out_proj"]),
    ],
)
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_refused_before_start_exactly_when_its_names_are(
    family: str, available: list[str], preset: Any
) -> None:
    def refused(action: Any) -> bool:
        try:
            action()
        except SpecError:
            return True
        return False

    names = [name for name in PRESETS[preset] if name in available]
    assert refused(lambda: check_lora_before_start(LoraSpec(targets=preset), family)) == refused(
        lambda: check_served_targets(names, "x")
    )

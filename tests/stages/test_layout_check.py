"""A layout that does not fit the model is refused before a run and by its first stage, not after the sampling."""

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import LayoutSpec
from longstraw_core.stages.layout_check import check_layout
from longstraw_core.stages.preflight import check_before_start
from tests.stages.scripted import make_spec, run

HYBRID = {"linear_num_value_heads": 48, "linear_num_key_heads": 16}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("context_parallel: 3", r"layout\.context_parallel: 3 does not divide the 4 value heads"),
        ("{context_parallel: 2, expert_parallel: 2}", r"layout\.expert_parallel: 2 ranks .* has none; use 1"),
    ],
)
def test_it_is_refused_before_the_run_and_by_the_first_stage(
    spec_fields: dict[str, Any], ranks: str, message: str
) -> None:
    spec = make_spec(spec_fields, f"layout={ranks if ranks.startswith('{') else '{' + ranks + '}'}")
    with pytest.raises(SpecError, match=message):
        check_before_start(spec)
    with pytest.raises(SpecError, match=message):
        run(spec, "audit_data")


def refused(tmp_path: Path, family: str, config: dict[str, Any], layout: LayoutSpec) -> bool:
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        check_layout(tmp_path, family, layout)
    except SpecError:
        return True
    return False


@pytest.mark.parametrize("nested", [False, True])
def test_qwen_allows_the_sizes_that_the_engine_divides(tmp_path: Path, nested: bool) -> None:
    config = {"text_config": HYBRID} if nested else HYBRID
    allowed = [
        ranks
        for ranks in range(1, 50)
        if not refused(tmp_path, "qwen3_5_text", config, LayoutSpec(context_parallel=ranks))
    ]
    assert allowed == [1, 2, 4, 8, 16, 48]


def test_experts_must_divide_and_heads_do_not_matter_without_linear_attention(tmp_path: Path) -> None:
    mixture = {"n_routed_experts": 6}
    for experts, expected in ((1, False), (2, False), (3, False), (4, True)):
        layout = LayoutSpec(context_parallel=12, expert_parallel=experts)
        assert refused(tmp_path, "glm_moe_dsa", mixture, layout) is expected
    dense = HYBRID | {"layer_types": ["full_attention"]}
    assert not refused(tmp_path, "qwen3_5_text", dense, LayoutSpec(context_parallel=5))

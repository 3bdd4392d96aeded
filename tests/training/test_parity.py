"""The parity gate: it passes for every mode, and it fails for a gradient that is wrong in one parameter only."""

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import get_peft_model_state_dict

from longstraw_core.cli.main import main
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LoraSpec
from longstraw_core.training import parity
from longstraw_core.training.conventional import ModelSize, random_policy_model, take_gradients
from longstraw_core.training.lora import inject_adapter, trainable_parameters
from longstraw_core.training.parity import ParityCase, run_parity


def case(**changes: Any) -> ParityCase:
    fields: dict[str, Any] = {
        "family": "qwen3_5_text",
        "gradient": "exact",
        "prompt_tokens": 70,
        "response_tokens": (9, 1, 20),
        "chunk_tokens": 30,
        "page_tokens": 16,
        "layers": 4,
        "seed": 0,
        "dtype": "float32",
        "checkpoint_layers": False,
        "device": "cpu",
    }
    return ParityCase(**(fields | changes))


@pytest.mark.parametrize("gradient", ["exact", "stopgrad", "response_adapter"])
def test_every_mode_is_within_tolerance(gradient: GradientMode) -> None:
    report = run_parity(case(gradient=gradient, checkpoint_layers=gradient == "exact"))
    assert report.passed, report.checks
    assert report.whole.cosine > 0.99999999
    assert {kind.name for kind in report.kinds} >= {"q_proj", "in_proj_qkv", "down_proj"}


@pytest.mark.parametrize("gradient", ["exact", "stopgrad", "response_adapter"])
@pytest.mark.parametrize("targets", ["attention", "attention+mlp", "all"])
def test_every_preset_of_glm_is_within_tolerance(gradient: GradientMode, targets: str) -> None:
    """Routed experts included; the reference of `response_adapter` masks `kv_b_proj` and the experts too."""
    changes = {"family": "glm_moe_dsa", "prompt_tokens": 40, "response_tokens": (5, 1), "targets": targets}
    report = run_parity(case(gradient=gradient, **changes))
    assert report.passed, report.checks
    kinds = {kind.name for kind in report.kinds}
    assert {"kv_b_proj", "o_proj"} <= kinds
    assert ({"gate_proj", "down_proj"} <= kinds) == (targets != "attention")
    assert ({"experts", "experts.base_layer"} <= kinds) == (targets == "all")


@pytest.mark.parametrize("targets", ["attention", "attention+mlp", "all"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_presets_and_gradient_names_of_oracle_trainer_and_peft_are_the_same(family: str, targets: Any) -> None:
    model = random_policy_model(family, ModelSize(layers=4), targets=targets)
    names = set(take_gradients(model))
    assert names == set(get_peft_model_state_dict(model))
    base = random_policy_model(family, ModelSize(layers=4), targets=targets).unload()
    assert names == set(trainable_parameters(inject_adapter(base, LoraSpec(rank=8, targets=targets), seed=0)))


def test_a_prompt_of_two_tokens_passes_for_every_seed() -> None:
    """Seed 1 missed the gate when `in_proj_a`, with 3e-4 of the gradient's norm, was judged by that norm alone."""
    for seed in range(3):
        changes = {"prompt_tokens": 2, "response_tokens": (1, 2), "chunk_tokens": 1, "seed": seed}
        report = run_parity(case(**changes))
        assert report.passed, (seed, report.checks)


def test_bfloat16_is_no_further_from_float32_than_conventional_bfloat16() -> None:
    report = run_parity(case(dtype="bfloat16"))
    assert report.passed, report.checks
    assert report.whole.relative_l2 > 1e-3  # it was bf16 that was measured


def with_wrong_parameter(monkeypatch: pytest.MonkeyPatch, position: float, factor: float) -> parity.ParityReport:
    """Run the gate with one gradient scaled: the one at `position` (0 to 1) in the order of norms."""
    computed = parity.engine_gradients

    def wrong(*arguments: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        gradients, logprobs = computed(*arguments)
        order = sorted(gradients, key=lambda name: float(gradients[name].norm()))
        name = order[round(position * (len(order) - 1))]
        gradients[name] = gradients[name] * factor
        return gradients, logprobs

    monkeypatch.setattr(parity, "engine_gradients", wrong)
    return run_parity(case())


def test_half_of_the_smallest_gradient_lost_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_wrong_parameter(monkeypatch, 0.0, 0.5)
    assert report.whole.cosine > 0.9999999
    assert report.worst.relative_l2 > 10 * parity.MAX_WORST_PARAMETER
    assert not report.passed


def test_one_wrong_parameter_fails_the_gate_though_the_cosine_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_wrong_parameter(monkeypatch, 0.25, 1.001)
    assert report.whole.cosine > 0.9999999
    assert report.worst.relative_l2 == pytest.approx(1e-3, rel=0.05)
    assert not report.passed
    arguments = ["parity", "--family", "qwen3_5_text", "--gradient", "exact", "--prompt", "70", "--layers", "4"]
    result = CliRunner().invoke(main, [*arguments, "--responses", "9", "--group", "2"])
    assert result.exit_code == 12, result.output
    assert "worst parameter" in result.output
    assert "OUT OF TOLERANCE" in result.output


def test_a_gradient_where_none_belongs_is_the_worst_parameter() -> None:
    reference = {"a": torch.ones(3), "b": torch.zeros(3)}
    assert parity.worst_parameter({"a": torch.ones(3), "b": torch.full((3,), 1e-3)}, reference).name == "b"
    assert parity.worst_parameter({"a": torch.ones(3), "b": torch.full((3,), 1e-9)}, reference).relative_l2 < 2e-6
    assert parity.worst_parameter({"a": torch.full((3,), torch.nan), "b": torch.zeros(3)}, reference).name == "a"


def test_lengths_that_are_none_are_refused() -> None:
    arguments = ["parity", "--family", "qwen3_5_text", "--gradient", "exact", "--responses"]
    for text in ("", "a", "4,0"):
        result = CliRunner().invoke(main, [*arguments, text])
        assert result.exit_code == 2
        assert "--responses" in result.output


def test_glm_on_two_ranks_that_share_tokens_and_experts_is_within_tolerance() -> None:
    arguments = "parity --family glm_moe_dsa --gradient exact --prompt 61 --responses 9,1 --layers 4 --chunk 25"
    result = CliRunner().invoke(main, [*arguments.split(), "--cp", "2", "--ep", "2", "-o", "json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert (printed["context_parallel"], printed["expert_parallel"], printed["passed"]) == (2, 2, True)
    assert "experts" in printed["kinds"]

"""The parity gate: it passes for every mode, and it fails for a gradient that is wrong in one parameter only."""

from typing import Any

import pytest
import torch
from click.testing import CliRunner

from longstraw_core.cli.main import main
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.training import parity
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


def test_bfloat16_is_no_further_from_float32_than_conventional_bfloat16() -> None:
    report = run_parity(case(dtype="bfloat16"))
    assert report.passed, report.checks
    assert report.whole.relative_l2 > 1e-3  # it was bf16 that was measured


def test_one_wrong_parameter_fails_the_gate_though_the_cosine_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = parity.engine_gradients

    def wrong(*arguments: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        gradients, logprobs = computed(*arguments)
        smallest = min(gradients, key=lambda name: float(gradients[name].norm()))
        gradients[smallest] = gradients[smallest] * 1.001
        return gradients, logprobs

    monkeypatch.setattr(parity, "engine_gradients", wrong)
    report = run_parity(case())
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
    assert parity.worst_parameter({"a": torch.ones(3), "b": torch.full((3,), 1e-9)}, reference).name == "none"
    assert parity.worst_parameter({"a": torch.full((3,), torch.nan), "b": torch.zeros(3)}, reference).name == "a"


def test_lengths_that_are_none_are_refused() -> None:
    arguments = ["parity", "--family", "qwen3_5_text", "--gradient", "exact", "--responses"]
    for text in ("", "a", "4,0"):
        result = CliRunner().invoke(main, [*arguments, text])
        assert result.exit_code == 2
        assert "--responses" in result.output

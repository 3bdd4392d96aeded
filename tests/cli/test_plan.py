"""`longstraw plan` on the two large models, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from longstraw_core.cli.main import main

PLANS = Path(__file__).parents[2] / "examples" / "plans"
HYBRID = ["plan", str(PLANS / "qwen3.6-27b.yaml"), "--context-parallel", "8"]
MIXTURE = ["plan", str(PLANS / "glm-5.2.yaml"), "--context-parallel", "32", "--expert-parallel", "32"]
DEVICE = ["--device", str(PLANS / "device-96gb.json")]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def plan(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("command", "gradient", "fits"),
    [(HYBRID, "stopgrad", True), (HYBRID, "exact", False), (MIXTURE, "stopgrad", True), (MIXTURE, "exact", True)],
)
def test_whether_two_million_tokens_fit_on_accelerators_of_96_gb(command: list[str], gradient: str, fits: bool) -> None:
    found = plan(*command, *DEVICE, "--prompt-tokens", "2097152", "--set", f"objective.gradient={gradient}")
    assert found["fits"] is fits
    assert (found["longest_prompt_tokens"] >= 2_097_152) is fits
    at_limit = plan(
        *command,
        *DEVICE,
        *("--prompt-tokens", str(found["longest_prompt_tokens"])),
        *("--set", f"objective.gradient={gradient}"),
    )
    beyond = plan(
        *command,
        *DEVICE,
        *("--prompt-tokens", str(found["longest_prompt_tokens"] + 1)),
        *("--set", f"objective.gradient={gradient}"),
    )
    assert at_limit["fits"]
    assert not beyond["fits"]


def test_flags_replace_the_files_figures() -> None:
    assert not plan(*HYBRID, *DEVICE, "--prompt-tokens", "8192", "--memory-gb", "48")["fits"]
    slow, fast = (plan(*HYBRID, *DEVICE, "--teraflops", figure)["compute_seconds"] for figure in ("100", "200"))
    assert slow == pytest.approx(2 * fast, rel=1e-3)


def test_without_figures_nothing_is_said_of_fit_or_time() -> None:
    found = plan(*HYBRID)
    assert found["fits"] is None
    assert found["compute_seconds"] is None
    assert found["weights_bytes"] > 50e9
    assert "give --device" in invoke(*HYBRID).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*HYBRID, "--memory-gb", "-1"], "memory_gb"),
        ([*HYBRID, "--teraflops", "100"], "memory_gb"),
        ([*HYBRID, "--device", "nowhere.json"], "nowhere.json"),
        ([*MIXTURE, "--expert-parallel", "24"], "does not divide"),
        ([*HYBRID, "--set", "model.snapshot=none"], "config.json"),
        ([*HYBRID, "--set", "model.family=glm_moe_dsa"], "model.family"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1

"""The memory formula against the peak resident set of real updates, each measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import CHUNK_TOKENS, STEADY_HEAP
from longstraw_core.planning.architecture import read_architecture
from longstraw_core.planning.memory import Ranks, activation_peak, adapter_parameters, resident_state
from longstraw_core.spec.transaction import LayoutSpec
from longstraw_core.training.conventional import ModelSize, random_policy_model

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.10
FP32 = 4


def measured_bytes(what: dict[str, Any]) -> int:
    """Peak beyond the loaded, warm model, of one whole update (gradients, clipping, AdamW step)."""
    environment = {**os.environ, **STEADY_HEAP, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--measure", json.dumps(what)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result = json.loads(completed.stdout.splitlines()[-1])
    return int(result["peak_bytes"]) - int(result["baseline_bytes"])


@pytest.mark.parametrize(
    ("family", "gradient", "prompt", "response", "checkpoint_layers"),
    [
        ("qwen3_5_text", "exact", 3072, 64, False),
        ("qwen3_5_text", "exact", 8192, 64, True),
        ("qwen3_5_text", "stopgrad", 512, 1500, False),
        ("glm_moe_dsa", "exact", 2048, 64, False),
        ("qwen3_5_text", "stopgrad", 3072, 64, True),
        ("glm_moe_dsa", "stopgrad", 512, 1000, False),
        ("glm_moe_dsa", "stopgrad", 2048, 64, False),
    ],
)
def test_the_formula_is_within_a_tenth_of_what_is_measured(
    family: str, gradient: Any, prompt: int, response: int, checkpoint_layers: bool
) -> None:
    what = {"family": family, "method": gradient, "prompt": prompt, "response": response, "group": 1}
    measured = measured_bytes({**what, "checkpoint_layers": checkpoint_layers})

    model = random_policy_model(family, ModelSize())
    config = model.peft_config["default"]
    # PEFT names a routed expert's parameter by its path in the layer; the plan by the last two parts
    experts = {".".join(name.split(".")[-2:]) for name in config.target_parameters or ()}
    targets = {*config.target_modules, *experts}
    architecture = read_architecture(model.get_base_model().config.to_dict(), family)
    layout = LayoutSpec(prompt_chunk_tokens=CHUNK_TOKENS, checkpoint_layers=checkpoint_layers)
    state = resident_state(architecture, layout, gradient, FP32, prompt)
    activations = activation_peak(
        architecture,
        layout,
        Ranks(),
        gradient=gradient,
        targets=targets,
        rank=config.r,
        element=FP32,
        response_tokens=response,
        prompt_tokens=prompt,
    )
    gradients = FP32 * adapter_parameters(architecture, targets, config.r)
    predicted = state.total + activations.peak + gradients
    assert abs(predicted / measured - 1) <= TOLERANCE, (predicted / 2**20, measured / 2**20)

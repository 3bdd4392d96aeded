"""The benchmark's measurement runs: one small update in a process of its own, with every field a figure reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine.py"


def test_one_measurement_of_glm_reports_time_memory_and_state() -> None:
    what = {"method": "exact", "family": "glm_moe_dsa", "prompt": 40, "group": 2, "response": 3}
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "--measure", json.dumps(what | {"checkpoint_layers": True, "trace": True})],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    result = json.loads(completed.stdout.splitlines()[-1])
    assert result["cpu_seconds"] > 0
    assert result["peak_bytes"] >= result["baseline_bytes"] > 0
    assert result["gradient_norm"] > 0
    assert result["state_bytes"]["pages"] > 0
    assert result["state_bytes"]["gradient_sinks"] > 0

"""How the real SGLang runs on a CPU in tests: arguments and environment, and the fake one's environment."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

ARGUMENTS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
)
HYBRID_ARGUMENTS = ("--mamba-ssm-dtype", "float32")
LORA_ARGUMENTS = ("--lora-backend", "torch_native")
SMALL = {"memory_fraction": 0.3, "cache_tokens": 8192, "running_requests": 8, "start_timeout_seconds": 400.0}
"""Fields of `sampling.server` for a machine without a GPU."""


def real_environment(patch: pytest.MonkeyPatch, *, ranks: int = 1) -> None:
    """Let the real server start on the CPU; the interpreter that has it comes from outside."""
    patch.setenv("LONGSTRAW_SGLANG_PYTHONPATH", str(HERE / "shim"))
    patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    patch.setenv("SGLANG_CPU_SEEDS", "1")
    patch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    patch.setenv("OMP_NUM_THREADS", "1")
    if ranks > 1:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join("0" for _ in range(ranks)))
        # Each rank compares the memory that is free now with the smallest figure of all ranks a moment before, and ends
        # where they differ by a tenth. On a CPU all look at the same memory, which other programs take and give back.
        patch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")


def fake_environment(patch: pytest.MonkeyPatch) -> None:
    """Let the stand-in be started in the place of the real server."""
    patch.setenv("LONGSTRAW_SGLANG_PYTHON", sys.executable)
    patch.setenv("LONGSTRAW_SGLANG_PYTHONPATH", str(HERE / "fake"))

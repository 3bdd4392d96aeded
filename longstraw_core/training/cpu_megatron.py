"""Lets megatron-core's gradient buffers and optimizer run on a machine without CUDA; does nothing where CUDA is.

megatron-core 0.16.1 names the current CUDA device and the string "cuda" in code that a CPU could run as well. The
modules listed here see torch through a proxy that answers with the CPU; torch itself and every other module stay as
they are. Why this is in the package and not in the tests: docs/decisions/0060-megatron-core-on-cpu.md.
"""

import importlib
from types import ModuleType
from typing import Any

import torch

PATCHED_MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.utils",
)
"""Modules whose name `torch` is replaced; each must have one."""
FACTORIES = ("empty", "ones", "tensor", "zeros")
"""Functions that are called with device="cuda"."""


class _CpuCuda(ModuleType):
    """`torch.cuda` whose current device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")


class _CpuTorch(ModuleType):
    """`torch` that allocates on the CPU what is asked for on CUDA."""

    cuda = _CpuCuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in FACTORIES:
            return value

        def on_cpu(*arguments: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return value(*arguments, **options)

        return on_cpu


def use_cpu() -> bool:
    """Patch the modules, unless CUDA is there; return whether anything was patched. Calling twice is allowed."""
    if torch.cuda.is_available():
        return False
    for name in PATCHED_MODULES:
        module: Any = importlib.import_module(name)
        if not isinstance(module.torch, _CpuTorch):
            module.torch = _CpuTorch("torch")
    return True

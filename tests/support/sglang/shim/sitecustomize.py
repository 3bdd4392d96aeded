"""Lets the real SGLang 0.5.23 run on a CPU in tests: found on PYTHONPATH by every process that the server spawns.

It adds what a CPU-only installation lacks (schemas of two torchvision operators, unpinned host memory, one Triton
norm) and, with SGLANG_CPU_SEEDS=1, lets the attention backend of the CPU take part in seeded sampling. It changes no
arithmetic that SGLang itself does on a CPU.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_KEPT: list[Any] = []
"""Operator libraries live as long as the process."""


class _Hook(importlib.abc.MetaPathFinder):
    """Runs `before` when one module is about to be imported and `after` when it has been; once each."""

    def __init__(
        self,
        name: str,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[ModuleType], None] | None = None,
    ) -> None:
        self.name = name
        self.before = before
        self.after = after

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        if self.before is not None:
            self.before()
        if self.after is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load, after = spec.loader.exec_module, self.after

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            after(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def _declare_torchvision_operators() -> None:
    """torchvision's C++ library is built for CUDA; declaring what it registers is all that its import needs."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


@functools.cache
def _allocate_without_pinning() -> None:
    """SGLang's LoRA code asks for pinned host memory, which a torch without an accelerator refuses."""
    import torch

    if torch.accelerator.is_available():
        return

    def unpinned(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create(*arguments: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return original(*arguments, **options)

        return create

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *arguments, **options: self  # type: ignore[method-assign]


def _gated_norm_in_torch(module: ModuleType) -> None:
    """The gated RMS norm of the delta net is the one Triton kernel of that path without a branch for the CPU."""
    import torch
    from torch.nn import functional

    def rms_norm_gated(
        *,
        x: Any,
        weight: Any,
        bias: Any,
        z: Any = None,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        is_rms_norm: bool = False,
        activation: str = "swish",
    ) -> Any:
        if not (is_rms_norm and norm_before_gate and bias is None and group_size in (None, x.shape[-1])):
            raise NotImplementedError("only the RMS norm before the gate, without bias or groups")
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        if z is not None:
            gate = z.reshape(x.shape).float()
            normed = normed * (functional.silu(gate) if activation in ("swish", "silu") else gate.sigmoid())
        return normed.to(x.dtype)

    module.rms_norm_gated = rms_norm_gated  # type: ignore[attr-defined]


def _allow_seeds_with_torch_attention(module: ModuleType) -> None:
    """The seeded sampler is plain torch; the list of backends is what keeps it from the CPU."""
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")  # type: ignore[attr-defined]
    module.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")  # type: ignore[attr-defined]


def _no_batch_invariant_kernels(module: ModuleType) -> None:
    module.enable_batch_invariant_mode = lambda *arguments, **options: None  # type: ignore[attr-defined]


sys.meta_path[:0] = [
    _Hook("torchvision", before=_declare_torchvision_operators),
    _Hook("sglang.srt.server_args", before=_allocate_without_pinning),
    _Hook("sglang.srt.lora", before=_allocate_without_pinning),
    _Hook("sglang.kernels.ops.attention.fla.layernorm_gated", after=_gated_norm_in_torch),
]
if os.environ.get("SGLANG_CPU_SEEDS") == "1":
    sys.meta_path[:0] = [
        _Hook("sglang.srt.arg_groups.choices", after=_allow_seeds_with_torch_attention),
        _Hook("sglang.srt.batch_invariant_ops", after=_no_batch_invariant_kernels),
    ]

"""A share of frozen weights in four bits per weight: NF4 of bitsandbytes, made into the model's dtype on use."""

import importlib
from typing import Any

import torch

from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.layer_weights import ALIGNMENT
from longstraw_core.spec.errors import SpecError


class Nf4Share:
    """A share in NF4: two weights per byte, and an fp32 scale for every 64.

    Args:
        share: flat, in the model's dtype; its length is a multiple of 64.

    Raises:
        SpecError: bitsandbytes is not installed, or cannot work on the share's device.
    """

    def __init__(self, share: torch.Tensor) -> None:
        self._functional = _functional()
        try:
            packed, state = self._functional.quantize_4bit(share, blocksize=ALIGNMENT, quant_type="nf4")
        except (RuntimeError, NotImplementedError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise SpecError(
                f"model.quantization: bitsandbytes cannot quantise on {share.device}: {reason}; "
                "use a device that it supports, or remove model.quantization"
            ) from error
        self._packed, self._scales, self._code = packed.view(-1), state.absmax, state.code

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self._packed.nbytes + self._scales.nbytes

    def put_together(self, exchange: Exchange, flat: torch.Tensor) -> None:
        """Fill the flat run with the values that the shares of all ranks stand for."""
        ranks = exchange.group.size
        packed = self._packed.new_empty(ranks * self._packed.numel())
        scales = self._scales.new_empty(ranks * self._scales.numel())
        exchange.gather_into(packed, self._packed, "weights")
        exchange.gather_into(scales, self._scales, "weights")
        state = self._functional.QuantState(
            absmax=scales, shape=flat.shape, code=self._code, blocksize=ALIGNMENT, quant_type="nf4", dtype=flat.dtype
        )
        # not into `flat` at once: bitsandbytes has no such kernel for a CPU
        flat.copy_(self._functional.dequantize_4bit(packed.view(-1, 1), state).view(-1))


def _functional() -> Any:
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise SpecError(
            "model.quantization: nf4 needs the package bitsandbytes, which is not installed here; "
            "install longstraw[nf4], or remove model.quantization"
        ) from error

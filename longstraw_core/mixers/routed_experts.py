"""GLM's mixture of experts: sigmoid router with a correction bias, grouped experts, and a shared expert.

Formulas: transformers 5.24 modeling_glm_moe_dsa.py, `GlmMoeDsaTopkRouter`, `GlmMoeDsaExperts` and `GlmMoeDsaMoE`.
The correction bias takes part in the choice only; the weights are the chosen experts' own scores. Ties go to the
expert with the lower index. The choice has no gradient, the weights have.
"""

from typing import Any

import torch
import torch.nn.functional as F

from longstraw_core.mixers.low_rank import LowRank, expert_weights
from longstraw_core.mixers.segment import Segment
from longstraw_core.resident.latent_state import LatentState


class _GroupedLinear(torch.autograd.Function):
    """Rows [S, in], sorted by expert, times each expert's weight [out, in]; the kernel seam for a grouped GEMM."""

    @staticmethod
    def forward(ctx: Any, x_SI: torch.Tensor, weight_EOI: torch.Tensor, bounds: list[int]) -> torch.Tensor:  # type: ignore[override]
        y_SO = x_SI.new_empty((x_SI.shape[0], weight_EOI.shape[1]))
        for expert, rows in _runs(bounds):
            torch.mm(x_SI[rows], weight_EOI[expert].t(), out=y_SO[rows])
        ctx.bounds = bounds
        ctx.save_for_backward(x_SI if ctx.needs_input_grad[1] else None, weight_EOI)
        return y_SO

    @staticmethod
    def backward(ctx: Any, dy_SO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x_SI, weight_EOI = ctx.saved_tensors
        dx_SI = dy_SO.new_empty((dy_SO.shape[0], weight_EOI.shape[2])) if ctx.needs_input_grad[0] else None
        dweight_EOI = torch.zeros_like(weight_EOI) if ctx.needs_input_grad[1] else None
        for expert, rows in _runs(ctx.bounds):
            if dx_SI is not None:
                torch.mm(dy_SO[rows], weight_EOI[expert], out=dx_SI[rows])
            if dweight_EOI is not None:
                torch.mm(dy_SO[rows].t(), x_SI[rows], out=dweight_EOI[expert])
        return dx_SI, dweight_EOI, None


def _runs(bounds: list[int]) -> list[tuple[int, slice]]:
    """The non-empty runs of rows, by expert; `bounds` are the cumulative counts."""
    begins = [0, *bounds[:-1]]
    return [(expert, slice(a, b)) for expert, (a, b) in enumerate(zip(begins, bounds, strict=True)) if b > a]


def _grouped_linear(
    x_SI: torch.Tensor, weight_EOI: torch.Tensor, updates: list[LowRank], bounds: list[int]
) -> torch.Tensor:
    """Apply each expert's weight and low-rank updates; no update is ever expanded to the size of the weight."""
    y_SO = _GroupedLinear.apply(x_SI, weight_EOI, bounds)
    for a_ERI, b_EOR, scale in updates:
        narrow_SR = _GroupedLinear.apply(x_SI.to(a_ERI.dtype), a_ERI, bounds)
        y_SO = y_SO + (_GroupedLinear.apply(narrow_SR, b_EOR, bounds) * scale).to(y_SO.dtype)  # type: ignore[operator]
    return y_SO  # type: ignore[return-value]


class RoutedExperts:
    """Per-token network of one sparse layer; its modules may be wrapped by PEFT."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def feed_forward(self, x_TH: torch.Tensor, segment: Segment, state: LatentState) -> torch.Tensor:
        """Apply the chosen experts and the shared one to normalised hidden states."""
        router = self._module.gate
        scores_TE = F.linear(x_TH.float(), router.weight.float()).sigmoid()
        if segment.choices == "reuse":
            chosen_TK = state.recorded_choice("experts", segment.start, segment.start + segment.length)
        else:
            chosen_TK = self._choose(scores_TE.detach())
            if segment.choices == "record":
                state.record_choice("experts", segment.start, chosen_TK)
        weights_TK = scores_TE.gather(1, chosen_TK)
        if router.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * router.routed_scaling_factor
        return self._experts(x_TH, chosen_TK, weights_TK) + self._module.shared_experts(x_TH)

    def _choose(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """Experts of every token [T, K]: the best ones of the best groups, by score plus correction bias."""
        router = self._module.gate
        rated_TE = scores_TE + router.e_score_correction_bias
        if router.num_group > 1:
            rated_TGE = rated_TE.view(rated_TE.shape[0], router.num_group, -1)
            groups_TG = rated_TGE.topk(2, dim=-1).values.sum(-1)
            kept = groups_TG.sort(dim=-1, descending=True, stable=True).indices[:, : router.topk_group]
            left_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, kept, value=False)
            rated_TE = rated_TGE.masked_fill(left_out_TG[..., None], float("-inf")).view_as(rated_TE)
        return rated_TE.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]

    def _experts(self, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        experts, updates = expert_weights(self._module.experts)
        tokens, top_k = chosen_TK.shape
        order_S = chosen_TK.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen_TK.reshape(-1), minlength=experts.num_experts)
        bounds = counts.cumsum(0).tolist()
        # an expanded copy and a permutation, not a gather with duplicates: its backward is a sum in fixed order
        x_SH = x_TH[:, None].expand(tokens, top_k, x_TH.shape[1]).reshape(tokens * top_k, -1)[order_S]
        gate_up_SI = _grouped_linear(x_SH, experts.gate_up_proj, updates.get("gate_up_proj", []), bounds)
        gate_SI, up_SI = gate_up_SI.chunk(2, dim=-1)
        y_SH = _grouped_linear(F.silu(gate_SI) * up_SI, experts.down_proj, updates.get("down_proj", []), bounds)
        y_TKH = y_SH[order_S.argsort()].view(tokens, top_k, -1)
        return (y_TKH * weights_TK[..., None]).sum(1).to(x_TH.dtype)

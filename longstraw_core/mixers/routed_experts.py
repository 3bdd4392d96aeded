"""GLM's mixture of experts: sigmoid router with a correction bias, grouped experts, and a shared expert.

Formulas: transformers 5.24 modeling_glm_moe_dsa.py, `GlmMoeDsaTopkRouter`, `GlmMoeDsaExperts` and `GlmMoeDsaMoE`.
The correction bias takes part in the choice only; the weights are the chosen experts' own scores. Ties go to the
expert with the lower index. The choice has no gradient, the weights have.

Experts may be spread over ranks: rows travel to the rank that holds their expert and their results back.
"""

from typing import Any

import torch
import torch.nn.functional as F

from longstraw_core.mixers.exchange.collectives import Exchange, exchanged_rows
from longstraw_core.mixers.exchange.expert_shard import held_experts
from longstraw_core.mixers.low_rank import LowRank, expert_weights
from longstraw_core.mixers.segment import Segment
from longstraw_core.resident.latent_state import LatentState


class _GroupedLinear(torch.autograd.Function):
    """Rows [S, in], sorted by expert, times each expert's weight [out, in]; the kernel seam for a grouped GEMM."""

    @staticmethod
    def forward(ctx: Any, x_SI: torch.Tensor, weight_EOI: torch.Tensor, counts: list[int]) -> torch.Tensor:  # type: ignore[override]
        ctx.counts = counts
        ctx.save_for_backward(x_SI if ctx.needs_input_grad[1] else None, weight_EOI)
        weights = weight_EOI.transpose(1, 2).unbind()
        return torch.cat([torch.mm(x, w) for x, w in zip(x_SI.split(counts), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, dy_SO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x_SI, weight_EOI = ctx.saved_tensors
        parts = dy_SO.split(ctx.counts)
        dx_SI = dweight_EOI = None
        if ctx.needs_input_grad[0]:
            dx_SI = torch.cat([torch.mm(dy, w) for dy, w in zip(parts, weight_EOI.unbind(), strict=True)])
        if ctx.needs_input_grad[1]:
            inputs = x_SI.split(ctx.counts)
            dweight_EOI = torch.stack([torch.mm(dy.t(), x) for dy, x in zip(parts, inputs, strict=True)])
        return dx_SI, dweight_EOI, None


def _grouped_linear(
    x_SI: torch.Tensor, weight_EOI: torch.Tensor, updates: list[LowRank], counts: list[int]
) -> torch.Tensor:
    """Apply each expert's weight and low-rank updates; no update is ever expanded to the size of the weight."""
    y_SO = _GroupedLinear.apply(x_SI, weight_EOI, counts)
    for a_ERI, b_EOR, scale in updates:
        narrow_SR = _GroupedLinear.apply(x_SI.to(a_ERI.dtype), a_ERI, counts)
        y_SO = y_SO + (_GroupedLinear.apply(narrow_SR, b_EOR, counts) * scale).to(y_SO.dtype)  # type: ignore[operator]
    return y_SO  # type: ignore[return-value]


class RoutedExperts:
    """Per-token network of one sparse layer; its modules may be wrapped by PEFT."""

    def __init__(self, module: Any, exchange: Exchange) -> None:
        self._module = module
        self._exchange = exchange
        self._expert_count: int = module.gate.weight.shape[0]
        self._held = held_experts(self._expert_count, exchange.group)

    def feed_forward(self, x_TH: torch.Tensor, segment: Segment, state: LatentState) -> torch.Tensor:
        """Apply the chosen experts and the shared one to normalised hidden states."""
        router = self._module.gate
        scores_TE = F.linear(x_TH.float(), router.weight.float()).sigmoid()
        if segment.choices == "reuse":
            chosen_TK = state.recorded_choice("experts", segment.resident, segment.resident + segment.length)
        else:
            chosen_TK = self._choose(scores_TE.detach())
            if segment.choices == "record":
                state.record_choice("experts", segment.resident, chosen_TK)
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
            rated_TGE = rated_TE.view(rated_TE.shape[0], router.num_group, rated_TE.shape[1] // router.num_group)
            groups_TG = rated_TGE.topk(2, dim=-1).values.sum(-1)
            kept = groups_TG.sort(dim=-1, descending=True, stable=True).indices[:, : router.topk_group]
            left_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, kept, value=False)
            rated_TE = rated_TGE.masked_fill(left_out_TG[..., None], float("-inf")).view_as(rated_TE)
        return rated_TE.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]

    def _experts(self, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        tokens, top_k = chosen_TK.shape
        order_S = chosen_TK.reshape(-1).argsort(stable=True)
        counts_E = torch.bincount(chosen_TK.reshape(-1), minlength=self._expert_count)
        # an expanded copy and a permutation, not a gather with duplicates: its backward is a sum in fixed order
        x_SH = x_TH[:, None].expand(tokens, top_k, x_TH.shape[1]).reshape(tokens * top_k, x_TH.shape[1])[order_S]
        if self._exchange.alone:
            y_SH = self._held_experts(x_SH, counts_E.tolist())
        else:
            y_SH = self._experts_of_all_ranks(x_SH, counts_E)
        y_TKH = y_SH[order_S.argsort()].view(tokens, top_k, x_TH.shape[1])
        return (y_TKH * weights_TK[..., None]).sum(1).to(x_TH.dtype)

    def _held_experts(self, x_SH: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Apply the experts that this rank holds to rows that are sorted by expert."""
        experts, updates = expert_weights(self._module.experts)
        weights = {
            name: (self._of_held(getattr(experts, name)), [self._update_of_held(u) for u in updates.get(name, [])])
            for name in ("gate_up_proj", "down_proj")
        }
        gate_SI, up_SI = _grouped_linear(x_SH, *weights["gate_up_proj"], counts).chunk(2, dim=-1)
        return _grouped_linear(F.silu(gate_SI) * up_SI, *weights["down_proj"], counts)

    def _of_held(self, weight_EXY: torch.Tensor) -> torch.Tensor:
        """The held experts' part of a weight, whether the model holds all experts' weights or only theirs."""
        return weight_EXY if weight_EXY.shape[0] == len(self._held) else weight_EXY[self._held.start : self._held.stop]

    def _update_of_held(self, update: LowRank) -> LowRank:
        return LowRank(self._of_held(update.a), self._of_held(update.b), update.scale)

    def _experts_of_all_ranks(self, x_SH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Send rows, sorted by expert, to the ranks that hold their experts and take the results back in this order."""
        exchange = self._exchange
        ranks, held = exchange.group.size, len(self._held)
        counts_MX = counts_E.view(ranks, held)
        arriving_MX = exchange.exchange_counts(counts_MX, "expert counts")
        send, receive = counts_MX.sum(1).tolist(), arriving_MX.sum(1).tolist()
        x_AH = exchanged_rows(x_SH, exchange, send, receive, "tokens to experts")
        # rows arrive by rank, then by expert; experts take theirs in the order of ranks, hence of tokens
        expert_A = torch.arange(held, device=x_SH.device).repeat(ranks).repeat_interleave(arriving_MX.reshape(-1))
        order_A = expert_A.argsort(stable=True)
        y_AH = self._held_experts(x_AH[order_A], arriving_MX.sum(0).tolist())
        return exchanged_rows(y_AH[order_A.argsort()], exchange, receive, send, "experts to tokens")

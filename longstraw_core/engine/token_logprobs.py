"""Log-probabilities and entropies of given tokens from hidden states, tiled over tokens and vocabulary.

No [R, V] tensor exists, in forward or backward: both walk tiles of `ROW_TILE` tokens by `VOCABULARY_TILE` entries.
Forward keeps a running maximum m, l = sum exp(z - m) and t = sum z exp(z - m) per token, so that
log-sum-exp = m + log l and entropy = lse - t / l. Backward: d logp[y] / d z = onehot(y) - softmax(z).
The head's weight is frozen: no gradient is computed for it.
"""

from collections.abc import Iterator
from typing import Any

import torch

ROW_TILE = 512
VOCABULARY_TILE = 16384


def _tiles(extent: int, size: int) -> Iterator[slice]:
    for begin in range(0, extent, size):
        yield slice(begin, min(begin + size, extent))


def _tile_logits(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits of one tile over temperature, fp32; the product itself is in the model's dtype, as in the model."""
    return torch.matmul(hidden_RH, weight_VH.t()).float().div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_RH: torch.Tensor, weight_VH: torch.Tensor, tokens_R: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, vocabulary = hidden_RH.shape[0], weight_VH.shape[0]
        device = hidden_RH.device
        lse_R = torch.empty(count, dtype=torch.float32, device=device)
        entropy_R = torch.empty(count, dtype=torch.float32, device=device)
        chosen_R = torch.zeros(count, dtype=torch.float32, device=device)
        for rows in _tiles(count, ROW_TILE):
            hidden, tokens = hidden_RH[rows], tokens_R[rows]
            peak = torch.full((hidden.shape[0],), float("-inf"), dtype=torch.float32, device=device)
            mass, weighted = torch.zeros_like(peak), torch.zeros_like(peak)
            for columns in _tiles(vocabulary, VOCABULARY_TILE):
                z = _tile_logits(hidden, weight_VH[columns], temperature)
                inside = (tokens >= columns.start) & (tokens < columns.stop)
                index = (tokens - columns.start).clamp(0, z.shape[1] - 1)
                chosen_R[rows] += torch.where(inside, z.gather(1, index[:, None])[:, 0], 0.0)
                new_peak = torch.maximum(peak, z.amax(dim=1))
                shrink = torch.exp(peak - new_peak)
                e = torch.exp(z - new_peak[:, None])
                mass = mass * shrink + e.sum(1)
                weighted = weighted * shrink + (z * e).sum(1)
                peak = new_peak
            lse_R[rows] = peak + mass.log()
            entropy_R[rows] = lse_R[rows] - weighted / mass
        ctx.temperature = temperature
        ctx.save_for_backward(hidden_RH, weight_VH, tokens_R, lse_R)
        ctx.mark_non_differentiable(entropy_R)
        return chosen_R - lse_R, entropy_R

    @staticmethod
    def backward(ctx: Any, gradient_R: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_RH, weight_VH, tokens_R, lse_R = ctx.saved_tensors
        dhidden_RH = torch.zeros(hidden_RH.shape, dtype=torch.float32, device=hidden_RH.device)
        for rows in _tiles(hidden_RH.shape[0], ROW_TILE):
            hidden, tokens = hidden_RH[rows], tokens_R[rows]
            scale = (gradient_R[rows] / ctx.temperature)[:, None]
            for columns in _tiles(weight_VH.shape[0], VOCABULARY_TILE):
                z = _tile_logits(hidden, weight_VH[columns], ctx.temperature)
                dz = z.sub_(lse_R[rows, None]).exp_().neg_()
                inside = (tokens >= columns.start) & (tokens < columns.stop)
                index = (tokens - columns.start).clamp(0, dz.shape[1] - 1)
                dz.scatter_add_(1, index[:, None], inside[:, None].float())
                dz.mul_(scale)
                dhidden_RH[rows] += torch.matmul(dz.to(weight_VH.dtype), weight_VH[columns])
        return dhidden_RH.to(hidden_RH.dtype), None, None, None


def token_logprobs(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, tokens_R: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probabilities [R], entropies [R]) of `tokens_R` under softmax(hidden @ weight^T / temperature).

    Both fp32; gradients flow from the log-probabilities into `hidden_RH` only.
    """
    return _TokenLogprobs.apply(hidden_RH, weight_VH, tokens_R, temperature)  # type: ignore[return-value]

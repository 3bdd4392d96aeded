"""Merging attention results that ranks computed over different keys, by their log-sum-exps."""

import torch


def packed(out_TNV: torch.Tensor, lse_TN: torch.Tensor) -> torch.Tensor:
    """Put outputs and log-sum-exps into one tensor [T, N, V + 1], fp32, so that they travel together."""
    return torch.cat((out_TNV, lse_TN[..., None]), dim=-1)


def merged(partials_PTNX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge packed partials [partials, T, N, V + 1] in their order; return (output, log-sum-exp).

    A partial that saw no key has log-sum-exp -inf and weight 0. At least one partial of every query must have seen one.
    """
    lse_PTN = partials_PTNX[..., -1]
    lse_TN = torch.logsumexp(lse_PTN, dim=0)
    weight_PTN = torch.exp(lse_PTN - lse_TN)
    out_TNV = torch.zeros_like(partials_PTNX[0, ..., :-1])
    for partial_TNX, weight_TN in zip(partials_PTNX, weight_PTN, strict=True):
        out_TNV.addcmul_(partial_TNX[..., :-1], weight_TN[..., None])
    return out_TNV, lse_TN


def row_sums(dout_TNV: torch.Tensor, out_TNV: torch.Tensor) -> torch.Tensor:
    """Row sums of dout * out in fp32, [T, N]: what the gradient of every score subtracts."""
    return (dout_TNV.float() * out_TNV.float()).sum(-1)

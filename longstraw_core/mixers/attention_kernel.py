"""Partial softmax attention over one tile of keys, its gradient, and the merge of partials: the kernel seam.

A faster backend replaces `partial_attention` and `partial_attention_gradient` by functions with the same contract.
The gradient takes the *merged* log-sum-exp and the merged output's row sums: with P = exp(S - lse) of the whole row,
every tile's contribution to dQ, dK and dV is exact and contributions simply add (FlashAttention-2, section 3.1).

Rows: query heads are grouped by the key head they share, so a query tile is [K, G, T, D] and one matrix product per
key head serves its whole group. All arithmetic is fp32, whatever the inputs are.
"""

import torch


def _scores(q_KGTD: torch.Tensor, k_KND: torch.Tensor, scale: float, diagonal: int | None) -> torch.Tensor:
    """Return scaled scores [K, G, T, N] in fp32; with `diagonal`, row t sees keys n <= t + diagonal only."""
    heads, group, rows, dim = q_KGTD.shape
    flat = q_KGTD.reshape(heads, group * rows, dim).float() * scale  # far fewer elements than the scores
    s_KGTN = torch.matmul(flat, k_KND.float().transpose(1, 2)).view(heads, group, rows, -1)
    if diagonal is not None:
        keys = s_KGTN.shape[-1]
        hidden_TN = torch.ones(rows, keys, dtype=torch.bool, device=s_KGTN.device).triu_(diagonal + 1)
        s_KGTN.masked_fill_(hidden_TN, float("-inf"))
    return s_KGTN


def partial_attention(
    q_KGTD: torch.Tensor, k_KND: torch.Tensor, v_KND: torch.Tensor, *, scale: float, diagonal: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to one tile of keys.

    Args:
        q_KGTD: queries [key heads, group, rows, head dim].
        k_KND: keys [key heads, tile, head dim]; `v_KND` alike.
        scale: factor of the scores.
        diagonal: None when every row sees every key, else row t sees keys n <= t + diagonal (every row at least one).

    Returns:
        Softmax output [K, G, T, D] and log-sum-exp of the scores [K, G, T], both fp32.
    """
    p_KGTN = _scores(q_KGTD, k_KND, scale, diagonal)
    peak_KGT1 = p_KGTN.amax(dim=-1, keepdim=True)
    p_KGTN.sub_(peak_KGT1).exp_()
    mass_KGT1 = p_KGTN.sum(dim=-1, keepdim=True)
    heads, group, rows, keys = p_KGTN.shape
    out = torch.matmul(p_KGTN.view(heads, group * rows, keys), v_KND.float()).view(heads, group, rows, -1)
    return out.div_(mass_KGT1), mass_KGT1.log_().add_(peak_KGT1)[..., 0]


def merge_partial(
    out_KGTD: torch.Tensor, lse_KGT: torch.Tensor, more_KGTD: torch.Tensor, more_lse_KGT: torch.Tensor
) -> None:
    """Merge a partial into the running (out, lse) in place; an lse of -inf means nothing was merged yet."""
    merged_KGT = torch.logaddexp(lse_KGT, more_lse_KGT)
    out_KGTD.mul_(torch.exp(lse_KGT - merged_KGT)[..., None])
    out_KGTD.addcmul_(more_KGTD, torch.exp(more_lse_KGT - merged_KGT)[..., None])
    lse_KGT.copy_(merged_KGT)


def partial_attention_gradient(
    dout_KGTD: torch.Tensor,
    q_KGTD: torch.Tensor,
    k_KND: torch.Tensor,
    v_KND: torch.Tensor,
    lse_KGT: torch.Tensor,
    delta_KGT: torch.Tensor,
    *,
    scale: float,
    diagonal: int | None,
    key_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return this tile's contributions (dq [K, G, T, D], dk [K, N, D], dv [K, N, D]), fp32.

    Args:
        dout_KGTD: gradient of the merged output.
        lse_KGT: *merged* log-sum-exp of the rows.
        delta_KGT: row sums of dout * merged out.
        key_gradient: False leaves dk and dv out (None).
    """
    heads, group, rows, dim = q_KGTD.shape
    p_KGTN = _scores(q_KGTD, k_KND, scale, diagonal).sub_(lse_KGT[..., None]).exp_()
    p = p_KGTN.view(heads, group * rows, -1)
    dout = dout_KGTD.reshape(heads, group * rows, -1)
    dv_KND = torch.matmul(p.transpose(1, 2), dout) if key_gradient else None
    ds = torch.matmul(dout, v_KND.float().transpose(1, 2))
    ds.sub_(delta_KGT.reshape(heads, group * rows, 1)).mul_(p)
    dq_KGTD = torch.matmul(ds, k_KND.float()).mul_(scale).view(heads, group, rows, dim)
    scaled_q = q_KGTD.reshape(heads, group * rows, dim).float() * scale
    dk_KND = torch.matmul(ds.transpose(1, 2), scaled_q) if key_gradient else None
    return dq_KGTD, dk_KND, dv_KND

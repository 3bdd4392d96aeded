"""The gated delta rule in chunk form, with initial and final state: the kernel seam of the GDN mixer.

Recurrence per value head, with state S [key dim, value dim] (transformers 5.24 modeling_qwen3_5.py,
`torch_recurrent_gated_delta_rule`; Gated DeltaNet, arXiv 2412.06464):

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    o_t = S_t^T q_t

Within a chunk the updates u solve a unit lower triangular system (the UT transform), so that a chunk costs a few
matrix products; chunks follow one another through S. A faster backend (flash-linear-attention's
`chunk_gated_delta_rule`) has the same contract.
"""

import torch
import torch.nn.functional as F

CHUNK_TOKENS = 64


def chunked_delta_rule(
    q_TVK: torch.Tensor,
    k_TVK: torch.Tensor,
    v_TVD: torch.Tensor,
    log_decay_TV: torch.Tensor,
    beta_TV: torch.Tensor,
    state_VKD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over a segment of any length >= 1; differentiable in every argument.

    Args:
        q_TVK: queries [tokens, value heads, key dim], normalised and scaled; any float dtype, computed in fp32.
        k_TVK: keys alike, normalised.
        v_TVD: values [tokens, value heads, value dim].
        log_decay_TV: g <= 0 [tokens, value heads].
        beta_TV: write strengths [tokens, value heads].
        state_VKD: state before the segment [value heads, key dim, value dim], fp32.

    Returns:
        Outputs [tokens, value heads, value dim] and the state after the segment, both fp32.
    """
    tokens = q_TVK.shape[0]
    chunk = CHUNK_TOKENS
    padding = -tokens % chunk

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[T, V, ...] -> [N, V, C, ...] in fp32, zero-padded: a padded token has g = 0 and beta = 0, a no-op."""
        x = x.float()
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
        return x.view(-1, chunk, *x.shape[1:]).transpose(1, 2)

    q_NVCK, k_NVCK, v_NVCD = chunks(q_TVK), chunks(k_TVK), chunks(v_TVD)
    g_NVC, beta_NVC = chunks(log_decay_TV).cumsum(-1), chunks(beta_TV)

    future_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=q_TVK.device).triu(1)
    # exp(g_i - g_j) for j <= i; masked before exp, which would overflow above the diagonal
    decay_NVCC = (g_NVC[..., :, None] - g_NVC[..., None, :]).masked_fill(future_CC, float("-inf")).exp()
    kT_NVKC = k_NVCK.transpose(-1, -2)
    written_NVCK = k_NVCK * beta_NVC[..., None]
    system_NVCC = (written_NVCK @ kT_NVKC) * decay_NVCC
    attend_NVCC = (q_NVCK @ kT_NVKC) * decay_NVCC
    since_start_NVC1 = g_NVC.exp()[..., None]
    # two right-hand sides: the values to write, and the keys that read the state before the chunk
    written_NVCD = v_NVCD * beta_NVC[..., None]
    u_NVCD = torch.linalg.solve_triangular(system_NVCC, written_NVCD, upper=False, unitriangular=True)
    reading_NVCK = written_NVCK * since_start_NVC1
    w_NVCK = torch.linalg.solve_triangular(system_NVCC, reading_NVCK, upper=False, unitriangular=True)
    q_NVCK = q_NVCK * since_start_NVC1
    to_end_NVC1 = (g_NVC[..., -1:] - g_NVC).exp()[..., None]
    keys_to_end_NVKC = (k_NVCK * to_end_NVC1).transpose(-1, -2)
    chunk_decay_NV11 = g_NVC[..., -1].exp()[..., None, None]

    state_VKD = state_VKD.float()
    outputs = []
    # unbind, not indexing: the backward of an index fills a whole [N, ...] tensor for every chunk
    parts = (tensor.unbind(0) for tensor in (u_NVCD, w_NVCK, q_NVCK, attend_NVCC, chunk_decay_NV11, keys_to_end_NVKC))
    for u_VCD, w_VCK, q_VCK, attend_VCC, decay_V11, keys_to_end_VKC in zip(*parts, strict=True):
        new_VCD = u_VCD - w_VCK @ state_VKD
        outputs.append(q_VCK @ state_VKD + attend_VCC @ new_VCD)
        state_VKD = state_VKD * decay_V11 + keys_to_end_VKC @ new_VCD
    out_NVCD = torch.stack(outputs)
    out_TVD = out_NVCD.transpose(1, 2).reshape(tokens + padding, *v_TVD.shape[1:])[:tokens]
    return out_TVD, state_VKD

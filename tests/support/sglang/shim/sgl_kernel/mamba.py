"""Kernels of the gated delta net in plain torch: reference semantics in fp32, one sequence and token at a time.

Shapes: T tokens, H heads, K key and V value width, C channels. Names, arguments and layouts are SGLang's.
"""

import itertools

import torch
from torch.nn import functional


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias=None,
    *,
    activation=None,
    conv_states=None,
    has_initial_state=None,
    cache_indices=None,
    query_start_loc=None,
    **_,
):
    """Depthwise causal convolution of packed sequences, x [C, T]; the last inputs go to `conv_states` [slot, C, *]."""
    channels, width = x.shape[0], weight.shape[-1]
    output = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end <= start:
            continue
        slot = int(cache_indices[number])
        before = (
            conv_states[slot][:, -(width - 1) :].to(x.dtype)
            if bool(has_initial_state[number])
            else x.new_zeros(channels, width - 1)
        )
        whole = torch.cat([before, x[:, start:end]], dim=1)
        convolved = functional.conv1d(
            whole.float()[None],
            weight.float().view(channels, 1, width),
            None if bias is None else bias.float(),
            groups=channels,
        )[0]
        output[:, start:end] = (functional.silu(convolved) if activation in ("silu", "swish") else convolved).to(
            x.dtype
        )
        conv_states[slot] = whole[:, -(width - 1) :].to(conv_states.dtype)
    return output


def causal_conv1d_update_cpu(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, **_):
    """The same for one new token per sequence, x [B, C]."""
    width = weight.shape[-1]
    kernel = weight.float().view(-1, width)
    output = torch.zeros_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()[: x.shape[0]]):
        if slot < 0:
            continue
        whole = torch.cat([conv_state[slot][:, -(width - 1) :].to(x.dtype), x[number][:, None]], dim=1)
        convolved = (whole.float() * kernel).sum(-1)
        if bias is not None:
            convolved = convolved + bias.float()
        output[number] = (functional.silu(convolved) if activation in ("silu", "swish", True) else convolved).to(
            x.dtype
        )
        conv_state[slot] = whole[:, -(width - 1) :].to(conv_state.dtype)
    return output


def _delta_rule(q_THK, k_THK, v_THV, decay_TH, beta_TH, state_HKV):
    """S ← S·exp(g); S ← S + k ⊗ β·(v − Sᵀk); output Sᵀq, with l2-normalised q (scaled) and k."""

    def normalised(x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    q_THK, k_THK = normalised(q_THK) * q_THK.shape[-1] ** -0.5, normalised(k_THK)
    output = torch.empty_like(v_THV)
    state = state_HKV
    for token in range(q_THK.shape[0]):
        state = state * decay_TH[token].exp()[:, None, None]
        key = k_THK[token][..., None]
        correction = (v_THV[token] - (state * key).sum(-2)) * beta_TH[token][:, None]
        state = state + key * correction[:, None, :]
        output[token] = (state * q_THK[token][..., None]).sum(-2)
    return output, state


def _over_sequences(q, k, v, decay, beta, pool, slots, bounds):
    """Run every packed sequence from and into its slot of the state pool [slot, H, V, K]."""
    output = torch.empty_like(v)
    repeats = v.shape[2] // q.shape[2]
    bounds = bounds.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        slot = int(slots[number])
        if end <= start or slot < 0:
            continue

        def heads(x, start=start, end=end):
            return x[0, start:end].float().repeat_interleave(repeats, dim=1)

        result, state = _delta_rule(
            heads(q),
            heads(k),
            v[0, start:end].float(),
            decay[start:end],
            beta[start:end],
            pool[slot].float().transpose(-1, -2),
        )
        output[0, start:end] = result.to(v.dtype)
        pool[slot] = state.transpose(-1, -2).to(pool.dtype)
    return output


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, *, initial_state, cu_seqlens, initial_state_indices, **_):
    """Prefill; g is the logarithm of the decay."""
    tokens, heads = v.shape[1], v.shape[2]
    output = _over_sequences(
        q,
        k,
        v,
        g.reshape(tokens, heads).float(),
        beta.reshape(tokens, heads).float(),
        initial_state,
        initial_state_indices,
        cu_seqlens,
    )
    return output, None, None


def _gates(A_log, a, b, dt_bias):
    return -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Logarithm of the decay and β, with a leading batch dimension."""
    decay, beta = _gates(A_log, a, b, dt_bias)
    return decay[None], beta[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    **_,
):
    """One decoding step of every sequence, gates included."""
    heads = v.shape[2]
    decay, beta = _gates(A_log, a.reshape(-1, heads), b.reshape(-1, heads), dt_bias)
    return _over_sequences(q, k, v, decay, beta, initial_state_source, initial_state_indices, cu_seqlens)


def fused_sigmoid_mul_cpu(x, gate):
    """The output gate of full attention, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def _zero_centred_norm(x, weight, eps, width):
    x = x.reshape(-1, width).float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, width):
    """Norm of queries and keys over the head width."""
    return (
        _zero_centred_norm(q, q_weight, eps, width).to(q.dtype),
        _zero_centred_norm(k, k_weight, eps, width).to(k.dtype),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, width, heads):
    """The same where queries and output gates alternate head by head."""
    both = q_gate.reshape(q_gate.shape[0], heads, 2 * width)
    return (
        _zero_centred_norm(both[..., :width], q_weight, eps, width).to(k.dtype),
        _zero_centred_norm(k, k_weight, eps, width).to(k.dtype),
        both[..., width:].contiguous(),
    )


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz,
    ba,
    key_heads,
    value_heads,
    key_width,
    value_width,
):
    """Take the two fused projections of the delta net apart."""
    keys, values = key_heads * key_width, value_heads * value_width
    q, k, v, z = qkvz.split([keys, keys, values, values], dim=-1)
    b, a = ba.split([value_heads, value_heads], dim=-1)
    gate = z.reshape(-1, value_heads, value_width).contiguous()
    return torch.cat([q, k, v], dim=-1), gate, b.contiguous(), a.contiguous()


def register() -> None:
    """Put the fused operators where SGLang looks for them."""
    for name, function in globals().items():
        if name.startswith("fused_"):
            setattr(torch.ops.sgl_kernel, name, function)

"""The chunked delta rule against the recurrence written out token by token, in fp64 autograd."""

import pytest
import torch

from longstraw_core.mixers.delta_rule import chunked_delta_rule


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        remembered = torch.einsum("vkd,vk->vd", state, k[t])
        state = state + torch.einsum("vk,vd->vkd", k[t], beta[t][:, None] * (v[t] - remembered))
        outputs.append(torch.einsum("vkd,vk->vd", state, q[t]))
    return torch.stack(outputs), state


def arguments(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads, key_dim, value_dim = 3, 8, 5
    q, k = (torch.randn(tokens, heads, key_dim, generator=generator) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = torch.randn(tokens, heads, value_dim, generator=generator)
    g = -torch.rand(tokens, heads, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    state = torch.randn(heads, key_dim, value_dim, generator=generator)
    return [q, k, v, g, beta, state]


@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 64, 65, 130])
def test_outputs_final_state_and_all_gradients_equal_the_recurrence(tokens: int) -> None:
    ours = [x.clone().requires_grad_() for x in arguments(tokens)]
    theirs = [x.double().requires_grad_() for x in arguments(tokens)]
    out, state = chunked_delta_rule(*ours)
    out_reference, state_reference = recurrence(*theirs)
    assert (out.double() - out_reference).norm() <= 3e-6 * out_reference.norm()
    assert (state.double() - state_reference).norm() <= 3e-6 * state_reference.norm()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    state_weights = torch.randn(state.shape, generator=torch.Generator().manual_seed(6))
    ((out * weights).sum() + (state * state_weights).sum()).backward()
    ((out_reference * weights).sum() + (state_reference * state_weights).sum()).backward()
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        assert (mine.grad.double() - reference.grad).norm() <= 5e-6 * reference.grad.norm()


def test_two_segments_equal_one() -> None:
    q, k, v, g, beta, state = arguments(100)
    whole, final = chunked_delta_rule(q, k, v, g, beta, state)
    first, between = chunked_delta_rule(q[:37], k[:37], v[:37], g[:37], beta[:37], state)
    second, after = chunked_delta_rule(q[37:], k[37:], v[37:], g[37:], beta[37:], between)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, final, rtol=1e-5, atol=1e-5)


def test_strong_decay_does_not_overflow() -> None:
    q, k, v, g, beta, state = arguments(130)
    g = (g * 200).requires_grad_()
    out, after = chunked_delta_rule(q, k, v, g, beta, state)
    (out.sum() + after.sum()).backward()
    assert g.grad is not None
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(g.grad).all())

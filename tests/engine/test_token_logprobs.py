"""The tiled head against dense log-softmax, with tiles small enough that every border is crossed."""

import pytest
import torch

from longstraw_core.engine import token_logprobs as module
from longstraw_core.engine.token_logprobs import token_logprobs


@pytest.mark.parametrize(("rows", "columns"), [(2, 7), (64, 3), (1, 1), (512, 16384)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_gradient_equal_the_dense_computation(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, temperature: float
) -> None:
    monkeypatch.setattr(module, "ROW_TILE", rows)
    monkeypatch.setattr(module, "VOCABULARY_TILE", columns)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 6, generator=generator).requires_grad_()
    weight = torch.randn(19, 6, generator=generator) * 3
    tokens = torch.tensor([0, 18, 7, 6, 13])
    logprobs, entropy = token_logprobs(hidden, weight, tokens, temperature=temperature)
    hidden_64 = hidden.detach().double().requires_grad_()
    dense = torch.log_softmax(hidden_64 @ weight.double().t() / temperature, -1)
    expected = dense.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(dense.exp() * dense).sum(-1), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    weights = torch.randn(5, generator=generator)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), hidden_64.grad, rtol=1e-5, atol=1e-5)


def test_nothing_of_the_size_of_the_logits_is_kept_for_backward() -> None:
    hidden = torch.randn(8, 4).requires_grad_()
    weight = torch.randn(5000, 4)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        token_logprobs(hidden, weight, torch.arange(8), temperature=1.0)
    assert max(saved) == weight.numel()  # the weight itself, by reference
    assert sorted(saved)[-2] <= hidden.numel()


def test_a_vocabulary_of_a_quarter_million_equals_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 8, generator=generator).requires_grad_()
    weight = torch.randn(250_001, 8, generator=generator)
    tokens = torch.tensor([0, 250_000, 16_384])
    logprobs, _ = token_logprobs(hidden, weight, tokens, temperature=1.0)
    dense_hidden = hidden.detach().double().requires_grad_()
    expected = torch.log_softmax(dense_hidden @ weight.double().t(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), dense_hidden.grad, rtol=1e-5, atol=1e-5)

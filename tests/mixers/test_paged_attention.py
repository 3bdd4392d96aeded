"""Paged attention against dense softmax attention over the concatenated sequence, with gradients into page sinks."""

import pytest
import torch

from longstraw_core.mixers import tiled_attention as module
from longstraw_core.mixers.paged_attention import paged_attention
from longstraw_core.resident.paged_keys_values import PagedKeysValues, PageLayout
from longstraw_core.resident.pool import ResidentPool

HEADS, KEY_HEADS, HEAD_DIM, PAGE = 6, 2, 8, 5
SCALE = HEAD_DIM**-0.5


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) tokens over all of k, v."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def pages(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float32) -> PagedKeysValues:
    """Pages filled in uneven appends."""
    store = PagedKeysValues(
        ResidentPool(torch.device("cpu"), 1 << 24), "layer", PageLayout(PAGE, KEY_HEADS, HEAD_DIM, dtype)
    )
    for begin in range(0, len(k), 7):
        part = slice(begin, min(begin + 7, len(k)))
        store.append((k[part], v[part]), part.stop - begin, keep_boundary=False)
    return store


def random_qkv(prefix: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(prefix * 1000 + tokens)
    q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)
    k, v = (torch.randn(prefix + tokens, KEY_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize(
    ("stored", "prefix", "tokens"), [(0, 0, 1), (0, 0, 9), (1, 1, 1), (5, 5, 3), (23, 23, 11), (23, 13, 6)]
)
@pytest.mark.parametrize("tile_elements", [8, 1 << 23])
def test_output_and_gradients_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch, stored: int, prefix: int, tokens: int, tile_elements: int
) -> None:
    """Whatever the tiles, and also when more tokens are stored than the prefix that is read."""
    monkeypatch.setattr(module, "SCORE_TILE_ELEMENTS", tile_elements)
    monkeypatch.setattr(module, "SEGMENT_TILE_TOKENS", 4)
    q, k, v = random_qkv(prefix, tokens)
    extra = torch.full((stored - prefix, KEY_HEADS, HEAD_DIM), 9.0)
    store = pages(torch.cat([k[:prefix], extra]), torch.cat([v[:prefix], extra]))
    store.open_sinks()
    q1, k1, v1 = q.clone().requires_grad_(), k[prefix:].clone().requires_grad_(), v[prefix:].clone().requires_grad_()
    out = paged_attention(q1, k1, v1, store.prefix(prefix, with_gradient=True), scale=SCALE)
    q2, k2, v2 = (x.double().requires_grad_() for x in (q, k, v))
    expected = dense(q2, k2, v2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # a second response adds to the sinks
        (paged_attention(q1, k1, v1, store.prefix(prefix, with_gradient=True), scale=SCALE) * weights).sum().backward()
    (expected * weights).sum().backward()
    assert q1.grad is not None
    assert k1.grad is not None
    assert v1.grad is not None
    dk_prefix, dv_prefix = store.take_gradients(0, stored)
    assert q2.grad is not None
    assert k2.grad is not None
    assert v2.grad is not None
    torch.testing.assert_close(q1.grad.double(), 2 * q2.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k1.grad.double(), 2 * k2.grad[prefix:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v1.grad.double(), 2 * v2.grad[prefix:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dk_prefix[:prefix].double(), 2 * k2.grad[:prefix], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dv_prefix[:prefix].double(), 2 * v2.grad[:prefix], rtol=1e-5, atol=1e-5)
    assert not dk_prefix[prefix:].any()


def test_without_sinks_only_the_segment_gets_gradients() -> None:
    q, k, v = random_qkv(10, 4)
    store = pages(k[:10], v[:10])
    q1, k1, v1 = q.requires_grad_(), k[10:].clone().requires_grad_(), v[10:].clone().requires_grad_()
    paged_attention(q1, k1, v1, store.prefix(10, with_gradient=False), scale=SCALE).sum().backward()
    assert q1.grad is not None
    with pytest.raises(RuntimeError, match="not open"):
        store.take_gradients(0, 10)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = random_qkv(12, 5)
    store = pages(k[:12] * 100, v[:12])
    out = paged_attention(q * 100, k[12:] * 100, v[12:], store.prefix(12, with_gradient=False), scale=SCALE)
    expected = dense(q.double() * 100, k.double() * 100, v.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_inputs_are_accumulated_in_float32() -> None:
    q, k, v = random_qkv(40, 8, torch.bfloat16)
    store = pages(k[:40], v[:40], torch.bfloat16)
    out = paged_attention(q, k[40:], v[40:], store.prefix(40, with_gradient=False), scale=SCALE)
    assert out.dtype == torch.bfloat16
    expected = dense(q.float(), k.float(), v.float())
    assert torch.equal(out, expected.to(torch.bfloat16)) or (out.float() - expected).abs().max() <= 2**-8 * 2

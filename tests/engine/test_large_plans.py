"""Plans beyond 2^31 elements: sizes are exact integers and addresses are 64 bits wide. Nothing is allocated."""

import torch

from longstraw_core.engine.policy import state_bytes
from longstraw_core.engine.token_logprobs import token_logprobs
from longstraw_core.mixers.families import bind_family
from longstraw_core.resident.paged_keys_values import PagedKeysValues, PageLayout
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine.oracle import tiny_config

META = torch.device("meta")


def test_the_state_of_two_million_tokens_is_counted_exactly() -> None:
    from transformers import Qwen3_5ForCausalLM

    config = tiny_config(
        ["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=1 << 22,
    )
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    family = bind_family(model, page_tokens=256)
    tokens = 2_097_152
    plan = state_bytes(family.layers, LayoutSpec(page_tokens=256), "exact", tokens + 1)
    keys_and_values = tokens * 2 * 4 * 256
    assert keys_and_values > 2**31
    assert plan.pages == 2 * keys_and_values
    assert plan.gradient_sinks > 4 * keys_and_values


def test_a_page_beyond_two_to_the_31_elements_is_addressed_with_64_bits() -> None:
    page_tokens = 1 << 21
    layout = PageLayout(page_tokens, heads=4, head_dim=256, dtype=torch.bfloat16)
    pages = PagedKeysValues(ResidentPool(META, 1 << 40), "layer 0", layout)
    chunk = torch.empty(page_tokens, 4, 256, dtype=torch.bfloat16, device=META)
    pages.append((chunk, chunk), page_tokens, keep_boundary=False)
    (tile,) = pages.prefix(page_tokens, with_gradient=False).tiles()
    last = tile.v_KTD[-1, -1]
    assert last.storage_offset() == 2 * 4 * page_tokens * 256 - 256
    assert last.storage_offset() > 2**31


def test_a_head_beyond_two_to_the_31_elements_is_tiled() -> None:
    vocabulary, hidden = 300_000, 8192
    assert vocabulary * hidden > 2**31
    weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device=META)
    hidden_RH = torch.empty(3, hidden, dtype=torch.bfloat16, device=META, requires_grad=True)
    logprobs_R, _ = token_logprobs(hidden_RH, weight, torch.zeros(3, dtype=torch.int64, device=META), temperature=1.0)
    logprobs_R.sum().backward()
    assert hidden_RH.grad is not None
    assert hidden_RH.grad.shape == (3, hidden)

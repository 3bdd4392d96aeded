"""`layout.checkpoint_layers`: the same gradients to the bit, and less kept for backward."""

import pytest
import torch

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine import glm_oracle, oracle
from tests.engine.oracle import gradients, random_batch, surrogate

MODELS = {"qwen3_5_text": oracle.tiny_policy_model, "glm_moe_dsa": glm_oracle.tiny_policy_model}


def kept_and_gradients(
    family: str, mode: GradientMode, *, checkpoint_layers: bool
) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that autograd keeps for the backward passes of an update, and its gradients."""
    model = MODELS[family]()
    batch = random_batch(130, [20, 3])
    layout = LayoutSpec(prompt_chunk_tokens=50, page_tokens=16, checkpoint_layers=checkpoint_layers)
    policy = Policy(model, layout, gradient=mode)
    state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        first = policy.replay(state, batch.responses[0], temperature=1.0)
    surrogate(first.logprobs_R, batch.advantages[0], 2).backward()
    surrogate(policy.replay(state, batch.responses[1], temperature=1.0).logprobs_R, batch.advantages[1], 2).backward()
    state.verify_witness()
    if mode == "exact":
        policy.reverse_sweep(state)
    state.release()
    return sum(kept.values()), gradients(model)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("mode", ["exact", "stopgrad", "response_adapter"])
def test_gradients_are_equal_to_the_bit_and_less_is_kept(family: str, mode: GradientMode) -> None:
    """GLM's layers share selections and route tokens: recomputed layers must find what they used."""
    plain_bytes, plain = kept_and_gradients(family, mode, checkpoint_layers=False)
    bytes_kept, recomputed = kept_and_gradients(family, mode, checkpoint_layers=True)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert bytes_kept < plain_bytes / 2

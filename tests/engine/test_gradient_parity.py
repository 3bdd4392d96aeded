"""The engine against conventional full-sequence autograd: log-probabilities and all three gradient modes."""

import contextlib

import pytest
import torch
from peft import PeftModel

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine.oracle import (
    Batch,
    adapter_off_on_prompt,
    detached_prompt_gradients,
    full_gradients,
    full_logprobs,
    gradients,
    random_batch,
    relative_error,
    surrogate,
    tiny_policy_model,
    worst_relative_error,
)

LAYERS = {
    "ends in attention": (
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "full_attention",
    ),
    "ends in GDN": ("full_attention", "linear_attention", "full_attention", "linear_attention"),
}
CASES = [
    # prompt, response lengths, prompt chunk, page
    (1, [1], 64, 16),
    (1, [2, 64, 5], 64, 16),
    (2, [1, 2], 1, 16),
    (3, [64, 1, 2], 1, 2),
    (3, [2], 64, 16),
    (127, [5, 1, 9, 2, 3, 4, 17, 30], 50, 16),
    (127, [64, 64], 126, 32),
    (512, [64, 2, 33, 1], 100, 48),
    (300, [70, 70, 70], 512, 256),
]


@pytest.fixture(scope="module", params=LAYERS, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> PeftModel:
    return tiny_policy_model(LAYERS[request.param])


def engine_gradients(
    model: PeftModel, batch: Batch, mode: GradientMode, chunk: int, page: int
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    policy = Policy(model, LayoutSpec(prompt_chunk_tokens=chunk, page_tokens=page), gradient=mode)
    model.zero_grad(set_to_none=True)
    state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
    logprobs = []
    for response, advantage in zip(batch.responses, batch.advantages, strict=True):
        replayed = policy.replay(state, response, temperature=1.0)
        surrogate(replayed.logprobs_R, advantage, len(batch.responses)).backward()
        state.verify_witness()
        logprobs.append(replayed.logprobs_R.detach())
    if mode == "exact":
        policy.reverse_sweep(state)
    state.release()
    assert policy.pool.used_bytes == 0
    return gradients(model), logprobs


@pytest.mark.parametrize(("prompt", "lengths", "chunk", "page"), CASES)
def test_exact_equals_conventional_training(
    model: PeftModel, prompt: int, lengths: list[int], chunk: int, page: int
) -> None:
    batch = random_batch(prompt, lengths)
    reference = full_gradients(model, batch)
    ours, logprobs = engine_gradients(model, batch, "exact", chunk, page)
    with torch.no_grad():
        for response, logprobs_R in zip(batch.responses, logprobs, strict=True):
            assert float((full_logprobs(model, batch.prompt, response) - logprobs_R).abs().max()) <= 5e-5
    assert relative_error(ours, reference) <= 2e-5
    assert worst_relative_error(ours, reference) <= 5e-5


@pytest.mark.parametrize(("prompt", "lengths", "chunk", "page"), CASES)
def test_stopgrad_equals_a_full_sequence_with_detached_prompt_state(
    model: PeftModel, prompt: int, lengths: list[int], chunk: int, page: int
) -> None:
    batch = random_batch(prompt, lengths)
    reference = detached_prompt_gradients(model, batch)
    ours, _ = engine_gradients(model, batch, "stopgrad", chunk, page)
    assert relative_error(ours, reference) <= 2e-5
    assert worst_relative_error(ours, reference) <= 5e-5


@pytest.mark.parametrize(("prompt", "lengths", "chunk", "page"), CASES)
def test_response_adapter_equals_a_full_sequence_with_lora_masked_on_the_prompt(
    model: PeftModel, prompt: int, lengths: list[int], chunk: int, page: int
) -> None:
    batch = random_batch(prompt, lengths)
    with adapter_off_on_prompt(model, prompt):
        reference = full_gradients(model, batch)
        with torch.no_grad():
            expected = [full_logprobs(model, batch.prompt, response) for response in batch.responses]
    ours, logprobs = engine_gradients(model, batch, "response_adapter", chunk, page)
    for theirs_R, ours_R in zip(expected, logprobs, strict=True):
        assert float((theirs_R - ours_R).abs().max()) <= 5e-5
    assert relative_error(ours, reference) <= 2e-5
    assert worst_relative_error(ours, reference) <= 5e-5


def test_the_modes_differ_so_that_the_tests_above_can_tell_them_apart(model: PeftModel) -> None:
    batch = random_batch(127, [20, 20])
    reference = full_gradients(model, batch)
    assert relative_error(detached_prompt_gradients(model, batch), reference) > 0.05
    with adapter_off_on_prompt(model, 127):
        assert relative_error(full_gradients(model, batch), reference) > 0.05


@pytest.mark.parametrize("targets", [("v_proj",), ("in_proj_a",), ("k_proj", "gate_proj"), ("down_proj",)])
def test_exact_with_few_targets(targets: tuple[str, ...]) -> None:
    """Layers below the first adapted module need no gradient; the graph must still be complete above it."""
    model = tiny_policy_model(targets=targets)
    batch = random_batch(60, [7, 3])
    reference = full_gradients(model, batch)
    ours, _ = engine_gradients(model, batch, "exact", 25, 16)
    assert relative_error(ours, reference) <= 2e-5
    assert worst_relative_error(ours, reference) <= 5e-5


@pytest.mark.parametrize("mode", ["exact", "stopgrad", "response_adapter"])
def test_2048_prompt_tokens_with_unequal_responses(mode: GradientMode) -> None:
    model = tiny_policy_model()
    batch = random_batch(2048, [64, 2])
    with adapter_off_on_prompt(model, 2048) if mode == "response_adapter" else contextlib.nullcontext():
        reference = (detached_prompt_gradients if mode == "stopgrad" else full_gradients)(model, batch)
    ours, _ = engine_gradients(model, batch, mode, 700, 256)
    assert relative_error(ours, reference) <= 2e-5
    assert worst_relative_error(ours, reference) <= 5e-5

"""GLM in the engine against conventional full-sequence autograd: log-probabilities and all three gradient modes."""

import contextlib

import pytest
import torch
from peft import PeftModel

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine.glm_oracle import (
    EXPERTS,
    INDEX_TOP_K,
    Choices,
    adapter_off_on_prompt,
    detached_prompt_gradients,
    engine_pinned_to,
    recorded_choices,
    tiny_policy_model,
)
from tests.engine.oracle import (
    Batch,
    full_gradients,
    full_logprobs,
    gradients,
    random_batch,
    relative_error,
    surrogate,
    worst_relative_error,
)

CASES = [
    # prompt, response lengths, prompt chunk, page
    (1, [1], 64, 16),
    (1, [2, 64, 5], 64, 16),
    (2, [1, 2], 1, 16),
    (3, [64, 1, 2], 1, 2),
    (INDEX_TOP_K + 1, [3, 2], 7, 5),
    (127, [5, 1, 9, 2, 3, 4, 17, 30], 50, 16),
    (127, [64, 64], 126, 32),
]


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return tiny_policy_model()


def engine_gradients(
    model: PeftModel, batch: Batch, mode: GradientMode, chunk: int, page: int, pins: list[Choices] | None = None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    record = "cut" if pins is None else "positions"
    layout = LayoutSpec(prompt_chunk_tokens=chunk, page_tokens=page, selection_record=record)
    policy = Policy(model, layout, gradient=mode)
    model.zero_grad(set_to_none=True)

    def pinned(index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if pins is None else engine_pinned_to(pins[index])

    with pinned(0):
        state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
    logprobs = []
    for index, (response, advantage) in enumerate(zip(batch.responses, batch.advantages, strict=True)):
        with pinned(index):
            replayed = policy.replay(state, response, temperature=1.0)
        surrogate(replayed.logprobs_R, advantage, len(batch.responses)).backward()
        state.verify_witness()
        logprobs.append(replayed.logprobs_R.detach())
    if mode == "exact":
        policy.reverse_sweep(state)
    state.release()
    assert policy.pool.used_bytes == 0
    return gradients(model), logprobs


def reference_of(
    model: PeftModel, batch: Batch, mode: GradientMode
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    masked = adapter_off_on_prompt(model, len(batch.prompt)) if mode == "response_adapter" else contextlib.nullcontext()
    with masked:
        gradient = detached_prompt_gradients(model, batch) if mode == "stopgrad" else full_gradients(model, batch)
        with torch.no_grad():
            return gradient, [full_logprobs(model, batch.prompt, response) for response in batch.responses]


def assert_parity(
    ours: tuple[dict[str, torch.Tensor], list[torch.Tensor]],
    reference: tuple[dict[str, torch.Tensor], list[torch.Tensor]],
) -> None:
    for theirs_R, ours_R in zip(reference[1], ours[1], strict=True):
        assert float((theirs_R - ours_R).abs().max()) <= 5e-5
    assert relative_error(ours[0], reference[0]) <= 2e-5
    assert worst_relative_error(ours[0], reference[0]) <= 5e-5


@pytest.mark.parametrize("mode", ["exact", "stopgrad", "response_adapter"])
@pytest.mark.parametrize(("prompt", "lengths", "chunk", "page"), CASES)
def test_log_probabilities_and_gradients_equal_the_full_sequence(
    model: PeftModel, mode: GradientMode, prompt: int, lengths: list[int], chunk: int, page: int
) -> None:
    """Experts' LoRA and `kv_b_proj` included in every mode; no choice is pinned at these lengths."""
    batch = random_batch(prompt, lengths)
    assert_parity(engine_gradients(model, batch, mode, chunk, page), reference_of(model, batch, mode))


@pytest.mark.parametrize(
    ("prompt", "lengths", "chunk", "mode"),
    [
        (512, [64, 2, 33, 1], 100, "exact"),
        (512, [64, 2, 33, 1], 100, "stopgrad"),
        (512, [64, 2], 200, "response_adapter"),
        (2048, [64, 3], 600, "exact"),
    ],
)
def test_longer_prompts_equal_the_full_sequence_under_the_same_choices(
    model: PeftModel, prompt: int, lengths: list[int], chunk: int, mode: GradientMode
) -> None:
    batch = random_batch(prompt, lengths)
    pins = []
    masked = adapter_off_on_prompt(model, prompt) if mode == "response_adapter" else contextlib.nullcontext()
    with masked, torch.no_grad():
        for response in batch.responses:
            with recorded_choices(model) as choices:
                full_logprobs(model, batch.prompt, response)
            pins.append(choices)
    assert_parity(engine_gradients(model, batch, mode, chunk, 48, pins), reference_of(model, batch, mode))


def test_the_modes_differ_so_that_the_tests_above_can_tell_them_apart(model: PeftModel) -> None:
    batch = random_batch(127, [20, 20])
    reference = full_gradients(model, batch)
    assert relative_error(detached_prompt_gradients(model, batch), reference) > 0.05
    with adapter_off_on_prompt(model, 127):
        assert relative_error(full_gradients(model, batch), reference) > 0.05


@pytest.mark.parametrize(
    ("targets", "experts"),
    [(("kv_b_proj",), ()), (("kv_a_proj_with_mqa", "down_proj"), ()), (("q_a_proj",), (EXPERTS[1],))],
)
def test_exact_with_few_targets(targets: tuple[str, ...], experts: tuple[str, ...]) -> None:
    """Layers below the first adapted module need no gradient; the graph must still be complete above it."""
    model = tiny_policy_model(targets=targets, experts=experts)
    batch = random_batch(60, [7, 3])
    assert_parity(engine_gradients(model, batch, "exact", 25, 16), reference_of(model, batch, "exact"))


def test_every_layer_with_an_indexer_and_a_dense_model(model: PeftModel) -> None:
    every = tiny_policy_model(
        experts=(), indexer_types=["full"] * 3, num_hidden_layers=3, first_k_dense_replace=3, n_group=1
    )
    batch = random_batch(90, [7, 30])
    assert_parity(engine_gradients(every, batch, "exact", 40, 16), reference_of(every, batch, "exact"))

"""Capture and replay: order, reference, temperature, convolution border, memory, bf16, and input that is refused."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from longstraw_core.engine.policy import Policy
from longstraw_core.resident import PrefixIdentity, PrefixState, prompt_token_digest
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.errors import DataRefused, IntegrityError, SpecError
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine.oracle import (
    VOCABULARY,
    full_gradients,
    full_logits,
    full_logprobs,
    gradients,
    random_batch,
    relative_error,
    surrogate,
    tiny_base,
    tiny_policy_model,
)


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return tiny_policy_model()


def policy_of(model: PeftModel, mode: GradientMode = "exact", chunk: int = 20, page: int = 8) -> Policy:
    return Policy(model, LayoutSpec(prompt_chunk_tokens=chunk, page_tokens=page), gradient=mode)


def update_of(policy: Policy, state: PrefixState, responses: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    for index, response in enumerate(responses):
        replayed = policy.replay(state, response, temperature=1.0)
        surrogate(replayed.logprobs_R, 1.0 + index, len(responses)).backward()
        state.verify_witness()
    if policy.gradient == "exact":
        policy.reverse_sweep(state)
    return gradients(policy.model)


def test_a_response_replayed_after_another_gives_exactly_what_it_gives_alone(model: PeftModel) -> None:
    batch = random_batch(50, [9, 1, 17])
    policy = policy_of(model)
    alone = policy.capture(batch.prompt, adapter=True)
    expected = policy.replay(alone, batch.responses[2], temperature=1.0)
    expected_gradient = update_of(policy, policy.capture(batch.prompt, adapter=True), [batch.responses[2]])
    after = policy.capture(batch.prompt, adapter=True)
    update_of(policy, after, batch.responses[:2])
    again = policy.replay(after, batch.responses[2], temperature=1.0)
    assert torch.equal(again.logprobs_R, expected.logprobs_R)
    assert torch.equal(again.entropy_R, expected.entropy_R)
    after.close_sinks()
    gradient = update_of(policy, after, [batch.responses[2]])
    assert all(torch.equal(gradient[name], expected_gradient[name]) for name in gradient)


def test_entropy_and_temperature_equal_the_full_forward(model: PeftModel) -> None:
    batch = random_batch(30, [12])
    policy = policy_of(model, "stopgrad")
    with torch.no_grad():
        state = policy.capture(batch.prompt, adapter=True)
        replayed = policy.replay(state, batch.responses[0], temperature=0.6)
        logprobs_RV = torch.log_softmax(full_logits(model, batch.prompt, batch.responses[0]) / 0.6, -1)
        expected = full_logprobs(model, batch.prompt, batch.responses[0], temperature=0.6)
    assert (replayed.logprobs_R - expected).abs().max() <= 5e-5
    assert (replayed.entropy_R + (logprobs_RV.exp() * logprobs_RV).sum(-1)).abs().max() <= 5e-5
    assert not replayed.logprobs_R.requires_grad


def test_the_reference_is_the_base_model_and_the_adapter_comes_back(model: PeftModel) -> None:
    batch = random_batch(30, [12])
    policy = policy_of(model)
    base = tiny_base()
    with torch.no_grad():
        reference = policy.capture(batch.prompt, adapter=False)
        replayed = policy.replay(reference, batch.responses[0], temperature=1.0, adapter=False)
        expected = full_logprobs(base, batch.prompt, batch.responses[0])  # type: ignore[arg-type]
    assert (replayed.logprobs_R - expected).abs().max() <= 5e-5
    assert not reference.sinks_open
    with torch.no_grad():
        own = policy.replay(policy.capture(batch.prompt, adapter=True), batch.responses[0], temperature=1.0)
        expected = full_logprobs(model, batch.prompt, batch.responses[0])
    assert (own.logprobs_R - expected).abs().max() <= 5e-5
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "lora_" in name)


def test_a_two_token_response_across_the_convolution_agrees_with_finite_differences() -> None:
    """The response is shorter than the convolution, so its gradient passes through the resident tail."""
    model = tiny_policy_model(("linear_attention", "linear_attention"), targets=("in_proj_qkv", "in_proj_b"))
    batch = random_batch(6, [2])
    policy = policy_of(model, chunk=2)

    def loss() -> float:
        with torch.no_grad():
            state = policy.capture(batch.prompt, adapter=True)
            value = policy.replay(state, batch.responses[0], temperature=1.0).logprobs_R.double().sum()
            state.release()
            return float(value)

    state = policy.capture(batch.prompt, adapter=True)
    model.zero_grad(set_to_none=True)
    policy.replay(state, batch.responses[0], temperature=1.0).logprobs_R.sum().backward()
    policy.reverse_sweep(state)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, generator=generator)
        step = 2e-2 / float(direction.norm())
        original = parameter.detach().clone()
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.copy_(original + sign * step * direction)
            values.append(loss())
        with torch.no_grad():
            parameter.copy_(original)
        expected = float((parameter.grad * direction).sum())
        measured = (values[0] - values[1]) / (2 * step)
        assert abs(measured - expected) <= 2e-2 * abs(expected) + 2e-3, name


def test_stored_and_restored_state_gives_identical_gradients(model: PeftModel, tmp_path: Path) -> None:
    batch = random_batch(50, [9, 3])
    identity = PrefixIdentity(
        snapshot_digest=sha256_digest(b"model"),
        adapter_digest=sha256_digest(b"adapter"),
        prompt_digest=prompt_token_digest(batch.prompt),
        gradient="exact",
        reference=False,
    )
    policy = policy_of(model)
    state = policy.capture(batch.prompt, adapter=True)
    state.save(tmp_path / "prefix", identity)
    expected = update_of(policy, state, batch.responses)
    restored = policy.load_state(tmp_path / "prefix", identity)
    ours = update_of(policy, restored, batch.responses)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    with pytest.raises(IntegrityError, match="reference is False, expected True"):
        policy.load_state(tmp_path / "prefix", identity.model_copy(update={"reference": True}))


@pytest.mark.parametrize("prompt", [1, 2])
def test_the_shortest_prompts_can_be_stored(model: PeftModel, tmp_path: Path, prompt: int) -> None:
    batch = random_batch(prompt, [4])
    identity = PrefixIdentity(
        snapshot_digest=sha256_digest(b"model"),
        adapter_digest=None,
        prompt_digest=prompt_token_digest(batch.prompt),
        gradient="exact",
        reference=True,
    )
    policy = policy_of(model)
    state = policy.capture(batch.prompt, adapter=False)
    state.save(tmp_path / "prefix", identity)
    with torch.no_grad():
        expected = policy.replay(state, batch.responses[0], temperature=1.0, adapter=False)
        restored = policy.load_state(tmp_path / "prefix", identity)
        ours = policy.replay(restored, batch.responses[0], temperature=1.0, adapter=False)
    assert torch.equal(ours.logprobs_R, expected.logprobs_R)


@pytest.mark.parametrize("mode", ["exact", "stopgrad", "response_adapter"])
@pytest.mark.parametrize(("prompt", "chunk", "page"), [(1, 20, 8), (2, 20, 8), (50, 20, 8), (61, 20, 60), (41, 20, 8)])
def test_state_bytes_says_exactly_what_is_allocated(
    model: PeftModel, mode: GradientMode, prompt: int, chunk: int, page: int
) -> None:
    policy = policy_of(model, mode, chunk, page)
    expected = policy.state_bytes(prompt)
    batch = random_batch(prompt, [3])
    state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
    assert policy.pool.used_bytes == expected.captured
    policy.replay(state, batch.responses[0], temperature=1.0)
    assert policy.pool.used_bytes == expected.total
    state.release()
    assert policy.pool.used_bytes == 0


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Peak of live bytes that autograd holds for backward, by unique storage."""
    live: dict[int, int] = {}
    peak = [0]

    class Held:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.key = tensor.untyped_storage().data_ptr()
            live[self.key] = tensor.untyped_storage().nbytes()
            peak[0] = max(peak[0], sum(live.values()))

        def __del__(self) -> None:
            live.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        yield peak


def test_memory_held_for_backward_grows_neither_with_the_group_nor_with_the_prompt(model: PeftModel) -> None:
    def peak_of(prompt: int, group: int) -> int:
        batch = random_batch(prompt, [16] * group)
        policy = policy_of(model, chunk=32, page=16)
        state = policy.capture(batch.prompt, adapter=True)
        with saved_bytes() as peak:
            update_of(policy, state, batch.responses)
        state.release()
        return peak[0]

    small = peak_of(97, 2)
    assert peak_of(97, 8) <= 1.002 * small
    assert peak_of(385, 2) <= 1.002 * small


def test_bfloat16_is_no_worse_than_conventional_bfloat16() -> None:
    batch = random_batch(100, [20, 20])
    truth = full_gradients(tiny_policy_model(), batch)
    model = tiny_policy_model(dtype=torch.bfloat16)
    conventional = relative_error(full_gradients(model, batch), truth)
    policy = policy_of(model, chunk=33, page=16)
    state = policy.capture(batch.prompt, adapter=True)
    model.zero_grad(set_to_none=True)
    for response, advantage in zip(batch.responses, batch.advantages, strict=True):
        surrogate(policy.replay(state, response, temperature=1.0).logprobs_R, advantage, 2).backward()
    policy.reverse_sweep(state)
    ours = relative_error(gradients(model), truth)
    assert ours <= 1.1 * conventional, (ours, conventional)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, VOCABULARY], f"token id {VOCABULARY} at position 1 is outside the vocabulary of {VOCABULARY}"),
        ([-1], "token id -1 at position 0"),
        ([1] * 4097, "prompt of 4097 and response of 1 tokens need 4097 positions, the model has 4096"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_allocated(
    model: PeftModel, prompt: list[int], message: str
) -> None:
    policy = policy_of(model)
    with pytest.raises(DataRefused, match=message):
        policy.capture(prompt, adapter=True)
    assert policy.pool.used_bytes == 0


@pytest.mark.parametrize(
    ("response", "temperature", "message"),
    [
        ([], 1.0, "response is empty"),
        ([VOCABULARY], 1.0, "outside the vocabulary"),
        ([1] * 4096, 1.0, "need 4098 positions"),
        ([1], 0.0, "temperature is 0.0"),
        ([1], float("nan"), "temperature is nan"),
    ],
)
def test_a_bad_response_is_refused_before_anything_is_allocated(
    model: PeftModel, response: list[int], temperature: float, message: str
) -> None:
    policy = policy_of(model)
    state = policy.capture([1, 2, 3], adapter=True)
    before = policy.pool.used_bytes
    with pytest.raises(DataRefused, match=message):
        policy.replay(state, response, temperature=temperature)
    assert policy.pool.used_bytes == before
    state.release()


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(model: PeftModel) -> None:
    policy = Policy(model, LayoutSpec(), gradient="exact", state_capacity_bytes=1000)
    with pytest.raises(SpecError, match=r"prompt of 600 tokens needs [\d,]+ bytes of resident state, 1,000 of 1,000"):
        policy.capture([1] * 600, adapter=True)
    assert policy.pool.used_bytes == 0


def test_contradicting_modes_are_refused(model: PeftModel) -> None:
    policy = policy_of(model, "response_adapter")
    with pytest.raises(SpecError, match="captures prompts with the adapter off"):
        policy.capture([1, 2], adapter=True)
    state = policy.capture([1, 2], adapter=False)
    with pytest.raises(SpecError, match="has no reverse sweep"):
        policy.reverse_sweep(state)


def test_unsupported_models_are_refused() -> None:
    layout = LayoutSpec()
    for change, message in (
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope type 'linear'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ):
        model = tiny_policy_model(("full_attention",), **change)
        with pytest.raises(SpecError, match=message):
            Policy(model, layout, gradient="exact")
    model = tiny_policy_model(("full_attention",))
    model.get_base_model().config.layer_types = ["sliding_attention"]
    with pytest.raises(SpecError, match="layer type 'sliding_attention'"):
        Policy(model, layout, gradient="exact")


def test_training_the_head_is_refused() -> None:
    model = tiny_policy_model(("full_attention",), targets=("q_proj", "lm_head"))
    with pytest.raises(SpecError, match="head cannot be trained"):
        Policy(model, LayoutSpec(), gradient="exact")

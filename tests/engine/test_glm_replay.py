"""GLM's capture and replay: order, recorded choices, files, memory, bf16, and models that are refused."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers import latent_attention, routed_experts
from longstraw_core.resident import PrefixIdentity, PrefixState, prompt_token_digest
from longstraw_core.resident.latent_state import LatentState
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.errors import IntegrityError, NumericError, SpecError
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec, SelectionRecord
from tests.engine.glm_oracle import INDEX_TOP_K, recorded_choices, tiny_base, tiny_policy_model
from tests.engine.oracle import full_gradients, full_logprobs, gradients, random_batch, relative_error, surrogate
from tests.engine.test_replay import saved_bytes, update_of


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return tiny_policy_model()


def policy_of(
    model: PeftModel,
    mode: GradientMode = "exact",
    chunk: int = 20,
    page: int = 8,
    record: SelectionRecord = "cut",
) -> Policy:
    layout = LayoutSpec(prompt_chunk_tokens=chunk, page_tokens=page, selection_record=record)
    return Policy(model, layout, gradient=mode)


def identity_of(prompt: list[int]) -> PrefixIdentity:
    return PrefixIdentity(
        snapshot_digest=sha256_digest(b"model"),
        adapter_digest=sha256_digest(b"adapter"),
        prompt_digest=prompt_token_digest(prompt),
        gradient="exact",
        reference=False,
    )


def latent_states(state: PrefixState) -> list[LatentState]:
    return [layer for layer in state.layers if isinstance(layer, LatentState)]


def test_a_response_replayed_after_another_gives_exactly_what_it_gives_alone(model: PeftModel) -> None:
    batch = random_batch(50, [9, 1, 17])
    policy = policy_of(model)
    expected = policy.replay(policy.capture(batch.prompt, adapter=True), batch.responses[2], temperature=1.0)
    expected_gradient = update_of(policy, policy.capture(batch.prompt, adapter=True), [batch.responses[2]])
    after = policy.capture(batch.prompt, adapter=True)
    update_of(policy, after, batch.responses[:2])
    again = policy.replay(after, batch.responses[2], temperature=1.0)
    assert torch.equal(again.logprobs_R, expected.logprobs_R)
    assert torch.equal(again.entropy_R, expected.entropy_R)
    after.close_sinks()
    gradient = update_of(policy, after, [batch.responses[2]])
    assert all(torch.equal(gradient[name], expected_gradient[name]) for name in gradient)


def test_the_reference_is_the_base_model(model: PeftModel) -> None:
    batch = random_batch(40, [12])
    policy = policy_of(model)
    with torch.no_grad():
        reference = policy.capture(batch.prompt, adapter=False)
        replayed = policy.replay(reference, batch.responses[0], temperature=1.0, adapter=False)
        expected = full_logprobs(tiny_base(), batch.prompt, batch.responses[0])  # type: ignore[arg-type]
    assert (replayed.logprobs_R - expected).abs().max() <= 5e-5


def test_selections_and_experts_are_those_of_transformers_but_for_near_ties(model: PeftModel) -> None:
    batch = random_batch(300, [1])
    policy = policy_of(model, chunk=70, record="positions")
    state = policy.capture(batch.prompt, adapter=True)
    with torch.no_grad(), recorded_choices(model) as choices:
        full_logprobs(model, batch.prompt, batch.responses[0])
    rows = wrong = 0
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    for layer, module in zip(latent_states(state)[:-1], layers, strict=False):
        recorders = [("experts", module.mlp.gate)] if hasattr(module.mlp, "gate") else []
        if module.self_attn.indexer is not None:
            recorders.append(("selection", module.self_attn.indexer))
        for name, recorder in recorders:
            ours = layer.recorded_choice(name, 0, 299)
            theirs = choices.rows(recorder, 299 - ours.shape[0], ours.shape[0])
            differs = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
            rows, wrong = rows + differs.numel(), wrong + int(differs.sum())
    assert rows == 3 * 299 + 2 * (299 - INDEX_TOP_K)
    assert wrong <= 2


@pytest.mark.parametrize("record", ["cut", "positions"])
def test_the_sweep_reuses_the_recorded_choices_and_decides_nothing(model: PeftModel, record: SelectionRecord) -> None:
    batch = random_batch(60, [9])
    policy = policy_of(model, record=record)
    expected = update_of(policy, policy.capture(batch.prompt, adapter=True), batch.responses)
    state = policy.capture(batch.prompt, adapter=True)
    model.zero_grad(set_to_none=True)
    surrogate(policy.replay(state, batch.responses[0], temperature=1.0).logprobs_R, 1.0, 1).backward()

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the sweep made a choice of its own")

    with (
        patch.object(latent_attention, "select_tokens", refuse),
        patch.object(routed_experts.RoutedExperts, "_choose", refuse),
    ):
        policy.reverse_sweep(state)
    ours = gradients(model)
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_recorded_choices_are_what_the_sweep_follows(model: PeftModel) -> None:
    """Other choices give another gradient: nothing is recomputed behind the record's back."""
    batch = random_batch(60, [9])
    policy = policy_of(model, record="positions")
    expected = update_of(policy, policy.capture(batch.prompt, adapter=True), batch.responses)
    for name in ("selection", "experts"):
        state = policy.capture(batch.prompt, adapter=True)
        for layer in latent_states(state):
            if name in layer._choices:
                # tokens 0 … K-1 are visible to every selecting token, experts 0 … K-1 always exist
                record = layer._choices[name]
                record.copy_(torch.arange(record.shape[1]).expand(record.shape).to(record.dtype))
        state.record_witness()
        assert relative_error(update_of(policy, state, batch.responses), expected) > 1e-3, name


@pytest.mark.parametrize(("prompt", "chunk"), [(INDEX_TOP_K + 2, 7), (513, 100), (700, 699)])
def test_recorded_cuts_give_the_gradient_that_recorded_positions_give_to_the_bit(
    model: PeftModel, prompt: int, chunk: int
) -> None:
    batch = random_batch(prompt, [9, 2])
    by_record = {}
    for record in ("cut", "positions"):
        policy = policy_of(model, chunk=chunk, record=record)
        by_record[record] = update_of(policy, policy.capture(batch.prompt, adapter=True), batch.responses)
    assert all(torch.equal(by_record["cut"][name], value) for name, value in by_record["positions"].items())


def test_a_sweep_that_scores_otherwise_than_the_capture_fails_and_names_layer_and_token(model: PeftModel) -> None:
    batch = random_batch(60, [9])
    policy = policy_of(model)
    state = policy.capture(batch.prompt, adapter=True)
    record = latent_states(state)[3]._choices["cut_scores"]
    record[50 - INDEX_TOP_K] = torch.nextafter(record[50 - INDEX_TOP_K], torch.tensor([1e9]))
    state.record_witness()
    surrogate(policy.replay(state, batch.responses[0], temperature=1.0).logprobs_R, 1.0, 1).backward()
    with pytest.raises(NumericError, match=rf"layer 3: token 50 finds {INDEX_TOP_K - 1} of the {INDEX_TOP_K} tokens"):
        policy.reverse_sweep(state)


@pytest.mark.parametrize("prompt", [1, 2, 70])
def test_stored_and_restored_state_gives_identical_gradients(model: PeftModel, tmp_path: Path, prompt: int) -> None:
    batch = random_batch(prompt, [9, 3])
    identity = identity_of(batch.prompt)
    policy = policy_of(model)
    state = policy.capture(batch.prompt, adapter=True)
    state.save(tmp_path / "prefix", identity)
    expected = update_of(policy, state, batch.responses)
    restored = policy.load_state(tmp_path / "prefix", identity)
    ours = update_of(policy, restored, batch.responses)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    stored = load_file(tmp_path / "prefix" / "layer-00001.safetensors")
    assert not any(name.startswith("index_keys") for name in stored), "layer 1 shares its selection"


def test_a_state_without_recorded_choices_cannot_be_swept(model: PeftModel) -> None:
    batch = random_batch(60, [3])
    policy = policy_of(model)
    state = policy.capture(batch.prompt, adapter=True)
    for layer in latent_states(state):
        layer._choices.clear()
    surrogate(policy.replay(state, batch.responses[0], temperature=1.0).logprobs_R, 1.0, 1).backward()
    with pytest.raises(IntegrityError, match=r"layer 0: the cut_scores of the prompt's tokens was not recorded"):
        policy.reverse_sweep(state)


@pytest.mark.parametrize("mode", ["exact", "stopgrad", "response_adapter"])
@pytest.mark.parametrize(("prompt", "chunk", "page"), [(1, 20, 8), (2, 20, 8), (61, 20, 60), (41, 20, 8)])
def test_state_bytes_says_exactly_what_is_allocated(
    model: PeftModel, mode: GradientMode, prompt: int, chunk: int, page: int
) -> None:
    policy = policy_of(model, mode, chunk, page)
    expected = policy.state_bytes(prompt)
    batch = random_batch(prompt, [3])
    state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
    assert policy.pool.used_bytes == expected.captured
    assert (expected.choices > 0) == (mode == "exact" and prompt > 1)
    policy.replay(state, batch.responses[0], temperature=1.0)
    assert policy.pool.used_bytes == expected.total
    state.release()
    assert policy.pool.used_bytes == 0


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


def test_writing_a_page_or_the_run_violates_the_witness_and_names_layer_and_page(model: PeftModel) -> None:
    policy = policy_of(model)
    state = policy.capture(list(range(30)), adapter=True)
    blocks = dict(state.layers[3].blocks())
    blocks["index-key page 1"][0, 0] += 1.0
    with pytest.raises(IntegrityError, match=r"layer 3, index-key page 1: was written"):
        state.verify_witness()
    state.record_witness()
    latent_states(state)[2].latents(10, backward=False)[0, 0] += 1.0
    with pytest.raises(IntegrityError, match=r"layer 2, latent the run of pages: was written"):
        state.verify_witness()


def test_bfloat16_is_no_worse_than_conventional_bfloat16() -> None:
    batch = random_batch(100, [20, 20])
    # transformers' grouped product wants rows of a multiple of 16 bytes
    truth = full_gradients(tiny_policy_model(moe_intermediate_size=24), batch)
    model = tiny_policy_model(dtype=torch.bfloat16, moe_intermediate_size=24)
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
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"indexer_types": ["shared", "full", "full", "full", "full"]}, "the first layer must be 'full'"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, object], message: str) -> None:
    model = tiny_policy_model()
    for name, value in change.items():
        setattr(model.get_base_model().config, name, value)
    with pytest.raises(SpecError, match=message):
        Policy(model, LayoutSpec(), gradient="exact")


@pytest.fixture(autouse=True)
def _clean(model: PeftModel) -> Iterator[None]:
    yield
    model.zero_grad(set_to_none=True)

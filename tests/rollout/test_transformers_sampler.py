"""The sampler's tokens and log-probabilities are those of an ordinary full forward pass of the PEFT model."""

from collections.abc import Callable, Iterator

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GenerationConfig, PreTrainedTokenizerBase

from longstraw_core.rollout.seeds import rollout_seed
from longstraw_core.rollout.transformers_sampler import check_prompt, sample_group
from longstraw_core.spec import DataRefused, NumericError, Prompt, Rollout
from longstraw_core.spec.transaction import SamplingSpec
from longstraw_core.training.tiny.model import initial_model
from longstraw_core.training.tiny.tokenizer import build_tokenizer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LINEARS += ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small lose time to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture
def untrained(tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    """A random hybrid model whose LoRA changes every output (both factors are non-zero)."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = get_peft_model(
            initial_model(tokenizer), LoraConfig(r=4, lora_alpha=8, target_modules=LINEARS, task_type="CAUSAL_LM")
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def prompt_of(length: int, name: str = "p0") -> Prompt:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 380, (length,), generator=generator).tolist()
    return Prompt(prompt_id=name, token_ids=tuple(ids), ground_truth="1", data_source="math_dapo", row=0)


def sampling_of(group_size: int = 4, tokens: int = 12, temperature: float = 1.0) -> SamplingSpec:
    return SamplingSpec(group_size=group_size, max_response_tokens=tokens, temperature=temperature)


def oracle_logprobs(model: PeftModel, rollout: Rollout, *, adapter_on_prompt: bool) -> torch.Tensor:
    """Full forward of prompt and response, one response at a time; LoRA masked on prompt positions by hooks."""
    boundary = len(rollout.prompt_token_ids) - 1
    ids = torch.tensor([[*rollout.prompt_token_ids, *rollout.token_ids]])

    def mask_prompt(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(output[:, :boundary]), output[:, boundary:]], dim=1)

    hooks = []
    if not adapter_on_prompt:
        hooks = [
            module["default"].register_forward_hook(mask_prompt)
            for name, module in model.named_modules()
            if name.endswith("lora_B")
        ]
        assert hooks
    try:
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, boundary:] / rollout.temperature
    finally:
        for hook in hooks:
            hook.remove()
    return torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, boundary + 1 :, None]).squeeze(1)


@pytest.mark.parametrize("adapter_on_prompt", [True, False], ids=["adapter everywhere", "response_adapter"])
@pytest.mark.parametrize(
    ("length", "group_size", "chunk", "temperature"),
    [(1, 8, 64, 1.0), (2, 3, 64, 1.0), (70, 8, 2048, 1.0), (150, 8, 64, 0.7), (150, 1, 33, 1.3), (65, 2, 1, 1.0)],
)
def test_logprobs_equal_a_full_forward(
    untrained: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    group_size: int,
    chunk: int,
    temperature: float,
    adapter_on_prompt: bool,
) -> None:
    rollouts = sample_group(
        untrained,
        tokenizer,
        prompt_of(length),
        sampling_of(group_size, temperature=temperature),
        seed=0,
        transaction=1,
        prompt_chunk_tokens=chunk,
        adapter_on_prompt=adapter_on_prompt,
    )
    assert [rollout.index for rollout in rollouts] == list(range(group_size))
    for rollout in rollouts:
        expected = oracle_logprobs(untrained, rollout, adapter_on_prompt=adapter_on_prompt)
        assert torch.tensor(rollout.logprobs) == pytest.approx(expected, abs=1e-4)


def test_the_two_modes_are_different_models(untrained: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    everywhere, response_only = (
        sample_group(
            untrained,
            tokenizer,
            prompt_of(80),
            sampling_of(),
            seed=0,
            transaction=1,
            adapter_on_prompt=adapter_on_prompt,
        )
        for adapter_on_prompt in (True, False)
    )
    differences = [
        (oracle_logprobs(untrained, rollout, adapter_on_prompt=True) - torch.tensor(rollout.logprobs))
        .abs()
        .max()
        .item()
        for rollout in response_only
    ]
    assert max(differences) > 1e-2
    assert everywhere != response_only


def test_the_prompt_is_read_once_in_chunks_whatever_the_group(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    shapes: list[tuple[int, ...]] = []
    embedding = untrained.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    try:
        sample_group(
            untrained,
            tokenizer,
            prompt_of(101),
            sampling_of(8, tokens=3),
            seed=0,
            transaction=1,
            prompt_chunk_tokens=40,
        )
    finally:
        hook.remove()
    assert shapes == [(1, 40), (1, 40), (1, 20), (8, 1), (8, 1), (8, 1)]


def test_same_seed_same_rollouts_and_the_callers_random_state_is_kept(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    def sample(seed: int = 3, transaction: int = 1, name: str = "p0") -> list[tuple[int, ...]]:
        rollouts = sample_group(
            untrained, tokenizer, prompt_of(20, name), sampling_of(8), seed=seed, transaction=transaction
        )
        return [rollout.token_ids for rollout in rollouts]

    before = torch.random.get_rng_state()
    first = sample()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert sample() == first
    assert len(set(first)) == 8
    assert sample(seed=4) != first
    assert sample(transaction=2) != first
    assert sample(name="p1") != first


def test_every_digit_of_the_seed_counts() -> None:
    assert rollout_seed(9007199254740990, 1, "p") != rollout_seed(9007199254740991, 1, "p")
    assert rollout_seed(1, 12, "p") != rollout_seed(11, 2, "p")
    assert 0 <= rollout_seed(0, 1, "p") < 2**63


def test_end_token_is_kept_with_its_logprob_and_the_rest_is_cut(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    ends = list(range(60))
    untrained.get_base_model().generation_config.eos_token_id = ends
    rollouts = sample_group(untrained, tokenizer, prompt_of(30), sampling_of(32, tokens=10), seed=0, transaction=1)
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        assert not any(token in ends for token in rollout.token_ids[:-1])
        if rollout.finish_reason == "stop":
            assert rollout.token_ids[-1] in ends
        else:
            assert len(rollout.token_ids) == 10
            assert rollout.token_ids[-1] not in ends
            assert rollout.truncated
        expected = oracle_logprobs(untrained, rollout, adapter_on_prompt=True)
        assert torch.tensor(rollout.logprobs) == pytest.approx(expected, abs=1e-4)


def test_an_end_token_at_the_very_last_position_is_a_stop(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    untrained.get_base_model().generation_config.eos_token_id = list(range(512))
    rollouts = sample_group(untrained, tokenizer, prompt_of(5), sampling_of(4, tokens=1), seed=0, transaction=1)
    assert {(rollout.finish_reason, len(rollout.token_ids)) for rollout in rollouts} == {("stop", 1)}


def test_the_end_token_falls_back_to_the_tokenizers(untrained: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    untrained.get_base_model().generation_config.eos_token_id = None
    rollouts = sample_group(untrained, tokenizer, prompt_of(5), sampling_of(2, tokens=2), seed=0, transaction=1)
    assert len(rollouts) == 2


def test_sampled_ids_are_kept_even_if_their_text_encodes_differently(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    rollouts = sample_group(untrained, tokenizer, prompt_of(20), sampling_of(8, tokens=16), seed=0, transaction=1)
    changed = [rollout for rollout in rollouts if tuple(tokenizer(rollout.text)["input_ids"]) != rollout.token_ids]
    assert changed, "random bytes should not all be valid text"
    for rollout in changed:
        expected = oracle_logprobs(untrained, rollout, adapter_on_prompt=True)
        assert torch.tensor(rollout.logprobs) == pytest.approx(expected, abs=1e-4)


def test_the_models_own_generation_settings_do_not_bend_the_distribution(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    def sample() -> list[Rollout]:
        return sample_group(untrained, tokenizer, prompt_of(20), sampling_of(8), seed=0, transaction=1)

    plain = sample()
    own = GenerationConfig(
        top_k=1, top_p=0.1, min_p=0.5, repetition_penalty=5.0, no_repeat_ngram_size=1, suppress_tokens=[1, 2]
    )
    own.eos_token_id = untrained.get_base_model().generation_config.eos_token_id
    untrained.get_base_model().generation_config = own
    assert sample() == plain
    assert untrained.get_base_model().generation_config is own


def test_tokens_are_drawn_with_their_stated_probability(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    draws = 4000
    rollouts = sample_group(untrained, tokenizer, prompt_of(3), sampling_of(draws, tokens=1), seed=0, transaction=1)
    probability = {rollout.token_ids[0]: torch.tensor(rollout.logprobs[0]).exp().item() for rollout in rollouts}
    likely = sorted(probability, key=lambda token: -probability[token])[:10]
    for token in likely:
        expected, seen = probability[token], sum(rollout.token_ids[0] == token for rollout in rollouts) / draws
        assert abs(seen - expected) < 5 * (expected * (1 - expected) / draws) ** 0.5


def test_training_mode_is_restored(untrained: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    untrained.train()
    sample_group(untrained, tokenizer, prompt_of(5), sampling_of(2, tokens=2), seed=0, transaction=1)
    assert untrained.training


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_adapter_is_a_numeric_error(
    untrained: PeftModel, tokenizer: PreTrainedTokenizerBase, value: float
) -> None:
    with torch.no_grad():
        next(p for name, p in untrained.named_parameters() if "lora_B" in name).fill_(value)
    with pytest.raises(NumericError, match="p0"):
        sample_group(untrained, tokenizer, prompt_of(5), sampling_of(2, tokens=2), seed=0, transaction=1)


def refused(change: Callable[[Prompt], Prompt], message: str, model: PeftModel) -> None:
    calls: list[object] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *arguments: calls.append(arguments))
    try:
        with pytest.raises(DataRefused, match=message):
            sample_group(model, build_tokenizer(), change(prompt_of(50)), sampling_of(2), seed=0, transaction=1)
    finally:
        hook.remove()
    assert not calls, "refused before any computation"


def test_a_prompt_beyond_the_models_positions_is_refused(untrained: PeftModel) -> None:
    config = untrained.get_base_model().config
    config.max_position_embeddings = 61
    refused(lambda prompt: prompt, r"p0 \(row 0\): 50 prompt tokens \+ 12 response tokens = 62 exceed .* 61", untrained)
    config.max_position_embeddings = 62
    check_prompt(config, prompt_of(50), 12)


def test_a_token_outside_the_vocabulary_is_refused(untrained: PeftModel) -> None:
    refused(
        lambda prompt: prompt.model_copy(update={"token_ids": (*prompt.token_ids, 512)}),
        "token id 512 at position 50",
        untrained,
    )

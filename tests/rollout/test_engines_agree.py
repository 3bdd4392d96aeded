"""Both engines write the same records: a response told in the server's words becomes the record transformers wrote."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase

from longstraw_core.rollout.reply import Wanted, read_reply, request_body, sample_seed
from longstraw_core.rollout.seeds import rollout_seed
from longstraw_core.rollout.transformers_sampler import sample_group
from longstraw_core.spec import Prompt, Rollout
from longstraw_core.spec.transaction import SamplingSpec
from longstraw_core.stages.sample_with_server import with_text
from longstraw_core.training.tiny.model import initial_model
from longstraw_core.training.tiny.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    adapter = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "out_proj"], init_lora_weights=False)
    return get_peft_model(initial_model(tokenizer), adapter).eval()


def in_the_servers_words(rollout: Rollout, body: dict[str, Any]) -> dict[str, Any]:
    """The reply of `/generate` that stands for this response."""
    reasons = {
        "stop": {"type": "stop", "matched": rollout.token_ids[-1]},
        "length": {"type": "length", "length": body["sampling_params"]["max_new_tokens"]},
    }
    return {
        "output_ids": list(rollout.token_ids),
        "prompt_token_ids": body["input_ids"],
        "meta_info": {
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(rollout.token_ids),
            "finish_reason": reasons[rollout.finish_reason],
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(rollout.logprobs, rollout.token_ids, strict=True)
            ],
        },
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt_ids=st.lists(st.integers(0, 380), min_size=1, max_size=20),
    group_size=st.integers(1, 4),
    max_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    end_tokens=st.sets(st.integers(0, 511), min_size=1, max_size=150),
    seed=st.integers(0, 2**53 - 1),
)
def test_the_records_are_the_same(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    group_size: int,
    max_tokens: int,
    temperature: float,
    end_tokens: set[int],
    seed: int,
) -> None:
    prompt = Prompt(prompt_id="p", token_ids=tuple(prompt_ids), ground_truth="1", data_source="d", row=0)
    model.get_base_model().generation_config.eos_token_id = sorted(end_tokens)
    sampling = SamplingSpec(group_size=group_size, max_response_tokens=max_tokens, temperature=temperature)
    rollouts = sample_group(model, tokenizer, prompt, sampling, seed=seed, transaction=1)
    for rollout in rollouts:
        wanted = Wanted(
            prompt=prompt,
            index=rollout.index,
            seed=sample_seed(rollout_seed(seed, 1, "p"), rollout.index),
            max_tokens=max_tokens,
            temperature=temperature,
            end_tokens=tuple(sorted(end_tokens)),
            vocabulary=512,
        )
        reply = in_the_servers_words(rollout, request_body(wanted, "r"))
        assert with_text(read_reply(wanted, reply), tokenizer) == rollout

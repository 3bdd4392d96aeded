"""Samples one prompt's group of responses with transformers `generate`; knows nothing of rewards or training.

The prompt is prefilled once with batch size 1, in chunks, up to its last token; the cache is then expanded to the
group and `generate` continues from the last prompt token. Sampling is plain: temperature only, no top-k or top-p, so
that a token's probability is softmax(logits / temperature) and nothing else. The expanded cache holds the prompt's
keys and values once per response: right for small models and moderate groups. Shapes: B group, T tokens, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from longstraw_core.rollout.seeds import rollout_seed
from longstraw_core.spec import DataRefused, NumericError, Prompt, Rollout
from longstraw_core.spec.transaction import SamplingSpec


def check_prompt(config: PreTrainedConfig, prompt: Prompt, max_response_tokens: int) -> None:
    """Refuse a prompt that the model cannot take; needs the configuration only, so it runs before any loading.

    Raises:
        DataRefused: prompt and response exceed the model's positions, or a token id is outside its vocabulary.
    """
    text = config.get_text_config()
    positions, vocabulary = int(text.max_position_embeddings), int(text.vocab_size)
    needed = len(prompt.token_ids) + max_response_tokens
    if needed > positions:
        raise DataRefused(
            f"prompt {prompt.prompt_id} (row {prompt.row}): {len(prompt.token_ids)} prompt tokens + "
            f"{max_response_tokens} response tokens = {needed} exceed the model's {positions} positions; "
            "shorten the prompt or lower sampling.max_response_tokens"
        )
    for position, token in enumerate(prompt.token_ids):
        if token >= vocabulary:
            raise DataRefused(
                f"prompt {prompt.prompt_id} (row {prompt.row}): token id {token} at position {position} is outside "
                f"the model's vocabulary of {vocabulary}; tokenizer and model do not belong together"
            )


def sample_group(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sampling: SamplingSpec,
    *,
    seed: int,
    transaction: int,
    prompt_chunk_tokens: int = 2048,
    adapter_on_prompt: bool = True,
) -> list[Rollout]:
    """Sample `sampling.group_size` responses to `prompt`; the same arguments give the same rollouts.

    With `adapter_on_prompt=False` (gradient mode `response_adapter`) the prompt is read without the adapter, which
    acts only from the last prompt token on. The caller's random state is left as it was.

    Raises:
        DataRefused: see `check_prompt`.
        NumericError: a log-probability is not finite.
    """
    base: Any = model.get_base_model()
    check_prompt(base.config, prompt, sampling.max_response_tokens)
    end_tokens = _end_tokens(base, tokenizer)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with nullcontext() if adapter_on_prompt else model.disable_adapter():
                cache = _prefill(base, prompt, prompt_chunk_tokens)
            # reorder_cache copies; recurrent and convolution states are written in place, so no two rows may share them
            if cache is not None and sampling.group_size > 1:
                first_row_B: Any = torch.zeros(sampling.group_size, dtype=torch.long, device=base.device)
                cache.reorder_cache(first_row_B)
            with _random_state(rollout_seed(seed, transaction, prompt.prompt_id), base.device):
                tokens_BT, logprobs_BT = _generate(base, prompt, sampling, cache, end_tokens)
    finally:
        model.train(was_training)
    return [
        _rollout(prompt, index, tokens, logprobs, sampling.temperature, set(end_tokens), tokenizer)
        for index, (tokens, logprobs) in enumerate(zip(tokens_BT.tolist(), logprobs_BT.tolist(), strict=True))
    ]


def _prefill(base: Any, prompt: Prompt, chunk_tokens: int) -> DynamicCache | None:
    """Read all prompt tokens but the last, `chunk_tokens` at a time; None when there is nothing to read."""
    ids_1T = torch.tensor([prompt.token_ids[:-1]], dtype=torch.long, device=base.device)
    if ids_1T.shape[1] == 0:
        return None
    cache = DynamicCache(config=base.config)
    for chunk_1T in ids_1T.split(chunk_tokens, dim=1):
        base.base_model(input_ids=chunk_1T, cache=cache, use_cache=True)
    return cache


def _generate(
    base: Any, prompt: Prompt, sampling: SamplingSpec, cache: DynamicCache | None, end_tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `generate` from the last prompt token on; return sampled tokens and their log-probabilities, both [B, T]."""
    prompt_BT = torch.tensor([prompt.token_ids], dtype=torch.long, device=base.device).expand(sampling.group_size, -1)
    trace = SampledLogprobs(prompt.prompt_id, sampling.temperature)
    settings = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=sampling.max_response_tokens,
        eos_token_id=end_tokens,
        pad_token_id=end_tokens[0],
        use_cache=True,
        disable_compile=True,  # the same arithmetic whether a compiler is installed or not
    )
    with _only_these_settings(base, settings):
        sequences_BT = base.generate(
            prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            generation_config=settings,
            logits_processor=LogitsProcessorList([trace]),
            stopping_criteria=StoppingCriteriaList([trace.recorder]),
            **({} if cache is None else {"cache": cache}),
        )
    tokens_BT = sequences_BT[:, prompt_BT.shape[1] :]
    return tokens_BT, trace.logprobs()[:, : tokens_BT.shape[1]]


class SampledLogprobs(LogitsProcessor):
    """Keeps the log-probability of each sampled token, in O(B) per step instead of the O(B·V) of `output_logits`.

    As a logits processor it sees each step's raw logits [B, V] (custom processors run before the temperature); its
    `recorder`, a stopping criterion that never stops, sees the token chosen from them right afterwards.
    """

    def __init__(self, prompt_id: str, temperature: float) -> None:
        self.prompt_id = prompt_id
        self.temperature = temperature
        self.recorder = _TokenRecorder(self)
        self._step_BV = torch.empty(0)
        self._taken: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._step_BV = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        if bool(torch.isnan(self._step_BV).any()):
            raise NumericError(
                f"prompt {self.prompt_id}: log-probabilities of response token {len(self._taken)} are not finite; "
                "the adapter or the base model holds NaN or infinite values"
            )
        return scores

    def take(self, tokens_B: torch.Tensor) -> None:
        """Record the log-probabilities of the tokens that were sampled from the step's distribution."""
        self._taken.append(self._step_BV.gather(1, tokens_B[:, None]).squeeze(1))

    def logprobs(self) -> torch.Tensor:
        """Return all recorded log-probabilities, [B, T]; those of padding after the end token mean nothing."""
        return torch.stack(self._taken, dim=1)


class _TokenRecorder(StoppingCriteria):
    def __init__(self, trace: SampledLogprobs) -> None:
        self.trace = trace

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.trace.take(input_ids[:, -1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _rollout(
    prompt: Prompt,
    index: int,
    tokens: list[int],
    logprobs: list[float],
    temperature: float,
    end_tokens: set[int],
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """Cut a row after its first end token and make it a record; the ids are those sampled, never re-tokenised."""
    length = next((position + 1 for position, token in enumerate(tokens) if token in end_tokens), len(tokens))
    ended = tokens[length - 1] in end_tokens
    for position, value in enumerate(logprobs[:length]):
        if not math.isfinite(value):
            raise NumericError(f"rollout {prompt.prompt_id}[{index}]: log-prob of response token {position} is {value}")
    return Rollout(
        prompt_id=prompt.prompt_id,
        index=index,
        prompt_token_ids=prompt.token_ids,
        token_ids=tuple(tokens[:length]),
        logprobs=tuple(logprobs[:length]),
        temperature=temperature,
        finish_reason="stop" if ended else "length",
        text=str(tokenizer.decode(tokens[:length], skip_special_tokens=True)),
    )


def _end_tokens(base: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that end a response: the model's generation settings, else the tokenizer's."""
    configured = base.generation_config.eos_token_id
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        raise DataRefused("neither the model's generation_config.json nor its tokenizer names an end-of-sequence token")
    return [int(token) for token in (configured if isinstance(configured, list) else [configured])]


@contextmanager
def _only_these_settings(base: Any, settings: GenerationConfig) -> Iterator[None]:
    """Hide the model's own generation settings: `generate` would fill unset fields (penalties, min_p) from them."""
    own = base.generation_config
    base.generation_config = settings
    try:
        yield
    finally:
        base.generation_config = own


@contextmanager
def _random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch for the body and give the caller's random state back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

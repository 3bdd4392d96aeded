"""What is asked of SGLang's `/generate` for one response, and the checks that make its reply a `Rollout`.

The server is believed in nothing that can be compared: prompt, lengths, token ids, log-probabilities and the reason
why it stopped must fit together, or the reply is refused with the name of the response it was for.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longstraw_core.rollout.server_command import ADAPTER_NAME
from longstraw_core.spec import NumericError, Prompt, Rollout, StageFailed

ROUNDING = 1e-6
"""A log-probability of a certain token may come out this much above 0."""


@dataclass(frozen=True)
class Wanted:
    """One response that is to be sampled."""

    prompt: Prompt
    index: int
    seed: int
    max_tokens: int
    temperature: float
    end_tokens: tuple[int, ...]
    vocabulary: int
    adapter: bool = True
    """Whether the adapter is asked for by name; not when it is merged into the served model."""

    @property
    def name(self) -> str:
        """How messages call this response."""
        return f"response {self.prompt.prompt_id}[{self.index}]"


def sample_seed(group_seed: int, index: int) -> int:
    """Seed of one response of a group; 63 bits, different for every index of a group."""
    return (group_seed + index) % 2**63


def request_body(wanted: Wanted, request_id: str) -> dict[str, Any]:
    """Return the JSON of one request: the plain distribution softmax(logits / temperature), nothing cut from it.

    Raises:
        StageFailed: a token id is outside the vocabulary, which would end the whole server.
    """
    for position, token in enumerate(wanted.prompt.token_ids):
        if token >= wanted.vocabulary:
            raise StageFailed(
                f"{wanted.name}: prompt token {position} is {token}, outside the vocabulary of {wanted.vocabulary}"
            )
    return {
        "rid": request_id,
        "input_ids": list(wanted.prompt.token_ids),
        "sampling_params": {
            "n": 1,
            "max_new_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "ignore_eos": False,
            "stop_token_ids": list(wanted.end_tokens),
            "no_stop_trim": True,
            "sampling_seed": wanted.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_prompt_token_ids": True,
        "stream": False,
        "lora_path": ADAPTER_NAME if wanted.adapter else None,
    }


def prompt_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 over token ids, short enough for a message."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def read_reply(wanted: Wanted, reply: Any) -> Rollout:
    """Return the rollout in a reply, without its text.

    Raises:
        StageFailed: something in the reply does not fit what was asked; names the response.
        NumericError: a log-probability is not finite or above 0.
    """
    meta = _field(wanted, reply, "meta_info", Mapping)
    _check_prompt(wanted, reply, meta)
    tokens = _field(wanted, reply, "output_ids", list)
    if not tokens:
        raise StageFailed(f"{wanted.name}: the server returned no tokens ({_shown(meta.get('finish_reason'))})")
    for position, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < wanted.vocabulary:
            raise StageFailed(f"{wanted.name}: response token {position} is {_shown(token)}, no id of the vocabulary")
    if len(tokens) > wanted.max_tokens:
        raise StageFailed(f"{wanted.name}: {len(tokens)} response tokens, at most {wanted.max_tokens} were asked for")
    if meta.get("completion_tokens") != len(tokens):
        raise StageFailed(
            f"{wanted.name}: the server counts {_shown(meta.get('completion_tokens'))} response tokens and returned "
            f"{len(tokens)}"
        )
    return Rollout(
        prompt_id=wanted.prompt.prompt_id,
        index=wanted.index,
        prompt_token_ids=wanted.prompt.token_ids,
        token_ids=tuple(tokens),
        logprobs=_logprobs(wanted, tokens, meta),
        temperature=wanted.temperature,
        finish_reason=_finish_reason(wanted, tokens, meta),
        text="",
    )


def _check_prompt(wanted: Wanted, reply: Any, meta: Mapping[str, Any]) -> None:
    """Some engines drop the tail, or the head, of a prompt above their context length without a word."""
    sent = wanted.prompt.token_ids
    if meta.get("prompt_tokens") != len(sent):
        raise StageFailed(
            f"{wanted.name}: the server read {_shown(meta.get('prompt_tokens'))} prompt tokens, {len(sent)} were sent; "
            "it cut the prompt"
        )
    returned = reply.get("prompt_token_ids")
    if not isinstance(returned, list) or tuple(returned) != sent:
        digest = prompt_digest(returned) if isinstance(returned, list) else "nothing"
        raise StageFailed(
            f"{wanted.name}: the prompt that the server read has digest {digest}, sent was {prompt_digest(sent)}"
        )


def _logprobs(wanted: Wanted, tokens: Sequence[int], meta: Mapping[str, Any]) -> tuple[float, ...]:
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        found = len(entries) if isinstance(entries, list) else 0
        raise StageFailed(f"{wanted.name}: {found} log-probabilities for {len(tokens)} response tokens")
    values: list[float] = []
    for position, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise StageFailed(
                f"{wanted.name}: log-probability {position} is {_shown(entry)}, not of response token {token}"
            )
        value = entry[0]
        if not _is_logprob(value):
            raise NumericError(f"{wanted.name}: log-prob of response token {position} is {_shown(value)}")
        values.append(min(float(value), 0.0))
    return tuple(values)


def _is_logprob(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value <= ROUNDING
    except OverflowError:  # a whole number beyond every float
        return False


def _finish_reason(wanted: Wanted, tokens: Sequence[int], meta: Mapping[str, Any]) -> Any:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if kind == "abort":
        return "abort"
    ends = [position for position, token in enumerate(tokens) if token in wanted.end_tokens]
    if kind == "stop" and ends == [len(tokens) - 1]:
        return "stop"
    if kind == "length" and not ends and len(tokens) == wanted.max_tokens:
        return "length"
    if kind == "length" and ends == [len(tokens) - 1]:
        return "stop"  # the end token was also the last one allowed
    raise StageFailed(
        f"{wanted.name}: the server stopped with {_shown(reason)} after {len(tokens)} of {wanted.max_tokens} tokens, "
        f"end tokens {list(wanted.end_tokens)} at positions {ends}; these do not agree"
    )


def _field(wanted: Wanted, reply: Any, name: str, kind: type) -> Any:
    if not isinstance(reply, Mapping) or not isinstance(reply.get(name), kind):
        raise StageFailed(f"{wanted.name}: the server's reply has no {name}: {_shown(reply)}")
    return reply[name]


def _shown(value: Any) -> str:
    text = repr(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 200 else text[:197] + "..."

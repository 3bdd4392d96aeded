"""Token ids of a chat prompt, made with the snapshot's own tokenizer; loads transformers only when asked to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from longstraw_core.spec import SpecError
from longstraw_core.spec.model import PositiveCount, StrictModel
from longstraw_core.spec.positions import YarnScaling, allowed_positions
from longstraw_core.spec.transaction import DataSpec

PromptTokenizer = Callable[[list[dict[str, str]]], list[int]]
"""Chat messages in, the prompt's token ids out, ending where the model starts to answer.

Raises ValueError when the chat template refuses the messages."""


class ModelLimits(StrictModel):
    """What the base model can read at most."""

    positions: PositiveCount
    vocabulary: PositiveCount
    """Rows of the embedding; token ids are below it."""


def read_model_limits(snapshot: Path, scaling: YarnScaling | None = None) -> ModelLimits:
    """Read the limits from the snapshot's `config.json` (or its `text_config` part), with `scaling` applied.

    Raises:
        SpecError: the file is missing, is not JSON or does not say, or `scaling` is for another model.
    """
    path = snapshot / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecError(f"{path}: missing; model.snapshot must name a complete Hugging Face snapshot") from error
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read as JSON: {error}; fetch the snapshot again") from error
    text_config: Any = config.get("text_config", config) if isinstance(config, dict) else {}
    found: dict[str, int] = {}
    for name in ("max_position_embeddings", "vocab_size"):
        value = text_config.get(name) if isinstance(text_config, dict) else None
        if type(value) is not int or value < 1:
            raise SpecError(f"{path}: {name} is {value!r}, expected a positive integer; fetch the snapshot again")
        found[name] = value
    positions = allowed_positions(found["max_position_embeddings"], scaling)
    return ModelLimits(positions=positions, vocabulary=found["vocab_size"])


def prompt_token_limit(data: DataSpec, limits: ModelLimits, max_response_tokens: int) -> int:
    """Return the longest prompt that leaves room for a full response: `data.max_prompt_tokens`, or all the room.

    Raises:
        SpecError: no room is left for a prompt, or less than `data.max_prompt_tokens`.
    """
    room = limits.positions - max_response_tokens
    if room < 1:
        raise SpecError(
            f"sampling.max_response_tokens is {max_response_tokens}, but the model has {limits.positions} positions "
            "for prompt and response together; lower sampling.max_response_tokens"
        )
    if data.max_prompt_tokens is None:
        return room
    if data.max_prompt_tokens > room:
        raise SpecError(
            f"data.max_prompt_tokens {data.max_prompt_tokens} + sampling.max_response_tokens {max_response_tokens} "
            f"exceed the model's {limits.positions} positions; lower one of them or set model.rope_scaling"
        )
    return data.max_prompt_tokens


def load_prompt_tokenizer(snapshot: Path) -> PromptTokenizer:
    """Load the snapshot's tokenizer and chat template, from local files only and without running code of its own.

    Raises:
        SpecError: the snapshot has no usable tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    if not snapshot.is_dir():
        raise SpecError(f"{snapshot}: not a directory; model.snapshot must name a Hugging Face snapshot")
    try:
        tokenizer = cast(
            Any, AutoTokenizer.from_pretrained(str(snapshot), local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # transformers raises many types here, from OSError to a bare Exception of the parser
        reason = " ".join(str(error).split())[:200]
        raise SpecError(f"{snapshot}: no usable tokenizer: {reason}; fetch tokenizer.json again") from error
    if not tokenizer.chat_template:
        raise SpecError(f"{snapshot}: the tokenizer has no chat template; add chat_template.jinja to the snapshot")

    special_tokens = sorted(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)

    def tokenize(messages: list[dict[str, str]]) -> list[int]:
        for message in messages:
            for token in special_tokens:
                if token in message["content"]:
                    raise ValueError(f"content has the special token {token!r}, which would forge a chat turn")
        try:
            # verbose=False: a prompt beyond tokenizer.model_max_length is the audit's business, not a warning
            ids = tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
            )
        except Exception as error:  # a template is a program of the snapshot's author: it may raise anything
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"the chat template refuses these messages: {reason}") from error
        return [int(token) for token in ids]

    _check_template(snapshot, tokenize)
    return tokenize


def _check_template(snapshot: Path, tokenize: PromptTokenizer) -> None:
    """Refuse a chat template that fails on, or ignores, an ordinary message: it is the snapshot's fault, no row's."""
    try:
        first, second = (tokenize([{"role": "user", "content": text}]) for text in ("one", "two"))
    except ValueError as error:
        raise SpecError(f"{snapshot}: {error}; repair the snapshot's chat template") from error
    if first == second:
        raise SpecError(f"{snapshot}: the chat template ignores the message's content; repair it")

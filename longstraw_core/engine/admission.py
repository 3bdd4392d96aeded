"""Refuses prompts and responses that the model cannot take, before anything is allocated."""

import math
from collections.abc import Sequence

from longstraw_core.spec.errors import DataRefused


def admit_tokens(token_ids: Sequence[int], *, vocabulary: int, name: str) -> None:
    """Check that `token_ids` is non-empty and within the vocabulary.

    Raises:
        DataRefused: names the first offending position.
    """
    if len(token_ids) == 0:
        raise DataRefused(f"{name} is empty: give at least one token")
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocabulary:
            raise DataRefused(
                f"{name}: token id {token} at position {position} is outside the vocabulary of {vocabulary} tokens"
            )


def admit_length(prompt_tokens: int, response_tokens: int, *, max_positions: int) -> None:
    """Check that the positions fed to the model (all tokens but the last) exist.

    Raises:
        DataRefused: names both lengths and the limit.
    """
    fed = prompt_tokens + response_tokens - 1
    if fed > max_positions:
        raise DataRefused(
            f"prompt of {prompt_tokens} and response of {response_tokens} tokens need {fed} positions, "
            f"the model has {max_positions}: shorten the prompt or the response"
        )


def admit_temperature(temperature: float) -> None:
    """Check that a temperature is positive and finite.

    Raises:
        DataRefused: it is not.
    """
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise DataRefused(f"temperature is {temperature}: it must be positive and finite")

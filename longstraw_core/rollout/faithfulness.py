"""Whether what is trained is what was sampled: the trainer's log-probabilities beside the sampler's.

Both say how likely the same tokens are under the same adapter. Rounding makes them differ by little; an adapter that
was not applied, another rope scaling or another tokenizer makes them differ by much.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longstraw_core.spec import NumericError, Rollout
from longstraw_core.spec.transaction import FaithfulnessSpec


@dataclass(frozen=True)
class Agreement:
    """How far the two are apart over the compared responses."""

    responses: int
    tokens: int
    mean: float
    """Mean |Δ log-prob| over tokens, in nats."""
    max: float
    worst: str
    """Where the largest difference is: prompt, response and token."""


def compared_responses(group: Sequence[Rollout], share: float, seed: int) -> list[int]:
    """Positions in `group` that are compared: ceil(share · size) of them, chosen by `seed` and the prompt."""
    count = min(len(group), max(1, -int(-share * len(group) // 1)))

    def order(position: int) -> bytes:
        rollout = group[position]
        return hashlib.sha256(f"longstraw faithfulness\0{seed}\0{rollout.prompt_id}\0{rollout.index}".encode()).digest()

    return sorted(sorted(range(len(group)), key=order)[:count])


def agreement(pairs: Iterable[tuple[Rollout, Sequence[float]]]) -> Agreement:
    """Compare each response's sampler log-probabilities with the trainer's.

    Raises:
        NumericError: the two have different lengths, or there is nothing to compare.
    """
    responses, tokens, total, largest, worst = 0, 0, 0.0, -1.0, ""
    for rollout, mine in pairs:
        if len(mine) != len(rollout.logprobs):
            raise NumericError(
                f"response {rollout.prompt_id}[{rollout.index}]: {len(mine)} trainer log-probabilities for "
                f"{len(rollout.logprobs)} of the sampler"
            )
        responses += 1
        for position, (trainer, sampler) in enumerate(zip(mine, rollout.logprobs, strict=True)):
            difference = abs(trainer - sampler)
            total += difference
            tokens += 1
            if not math.isnan(largest) and not difference <= largest:  # one NaN stays the largest
                largest, worst = difference, f"response {rollout.prompt_id}[{rollout.index}] token {position}"
    if tokens == 0:
        raise NumericError("no sampled token to compare sampler and trainer by")
    return Agreement(responses, tokens, total / tokens, largest, worst)


def check_agreement(found: Agreement, limits: FaithfulnessSpec) -> None:
    """Refuse responses that were not sampled from the policy that is trained.

    Raises:
        NumericError: a limit of `sampling.faithfulness` is exceeded.
    """
    for name, value, limit in (
        ("mean", found.mean, limits.mean_limit),
        ("max", found.max, limits.max_limit),
    ):
        if limit is not None and not value <= limit:
            raise NumericError(
                f"sampler and trainer disagree: {name} |Δ log-prob| is {value:.4g} nats over {found.tokens} tokens of "
                f"{found.responses} responses, sampling.faithfulness.{name}_limit is {limit:g} (largest: "
                f"{found.max:.4g}, {found.worst}); the usual causes are an adapter that was not applied, another "
                "rope scaling and another tokenizer"
            )

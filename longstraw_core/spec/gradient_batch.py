"""The input of `longstraw gradients`: one prompt, its responses with advantages, and the objective's parameters."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.model import FiniteFloat, PositiveCount, StrictModel, TokenId
from longstraw_core.spec.parse import describe_validation_errors
from longstraw_core.spec.transaction import UnitFloat

_LARGEST_FLOAT32 = 3.4028234663852886e38
Float32 = Annotated[FiniteFloat, Field(ge=-_LARGEST_FLOAT32, le=_LARGEST_FLOAT32)]
"""A number that is finite in the precision that losses are computed in."""
LogProbability = Annotated[Float32, Field(le=0.0)]


class BatchResponse(StrictModel):
    """One response."""

    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    advantage: Float32
    old_logprobs: tuple[LogProbability, ...] | None = None
    """Log-probabilities before the update; null means on-policy (the ratio is 1)."""

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> "BatchResponse":
        if self.old_logprobs is not None and len(self.old_logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.old_logprobs)} old_logprobs for {len(self.token_ids)} token_ids")
        return self


class GradientBatch(StrictModel):
    """One group."""

    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    responses: Annotated[tuple[BatchResponse, ...], Field(min_length=1)]
    clip: tuple[UnitFloat, Annotated[Float32, Field(ge=0.0)]] = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1."""
    aggregation: Literal["sequence_mean", "token_mean", "dr_grpo"] = "sequence_mean"
    """`sequence_mean`: mean over responses of each response's mean; `token_mean`: mean over all tokens;
    `dr_grpo`: sum over responses * max_response_tokens."""
    max_response_tokens: PositiveCount | None = None
    """The constant of `dr_grpo`; needed there and allowed nowhere else."""

    @model_validator(mode="after")
    def _constant_of_dr_grpo(self) -> "GradientBatch":
        if (self.max_response_tokens is not None) != (self.aggregation == "dr_grpo"):
            raise ValueError("max_response_tokens is given exactly when aggregation is 'dr_grpo'")
        return self


def parse_gradient_batch(content: bytes, source: str) -> GradientBatch:
    """Parse and validate a batch file; `source` names it in messages.

    Raises:
        SpecError: not JSON, or a wrong field; one line, about the first fault.
    """
    from json import loads

    def refuse(name: str) -> Any:
        raise SpecError(f"{source}: {name} is not a JSON number; every number must be finite")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in fields:
                raise SpecError(f"{source}: {name!r:.40} appears twice in one object; keep one")
            if not name.isprintable():
                raise SpecError(f"{source}: unknown field {name!r:.40}")
            fields[name] = value
        return fields

    try:
        value = loads(content, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, or an integer of too many digits
        raise SpecError(f"{source}: cannot be read as JSON: {error}") from error
    try:
        return GradientBatch.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise SpecError(describe_validation_errors(error, GradientBatch, source, value)[0]) from error

"""What the data stages hand to each other: prompts, rollouts and scored groups."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longstraw_core.spec.model import Count, FiniteFloat, StrictModel, TokenId

FinishReason = Literal["stop", "length", "abort"]
SignalStatus = Literal["signal", "no_signal"]


class Prompt(StrictModel):
    """One data row after the audit, with the token ids that sampler and trainer both read."""

    prompt_id: Annotated[str, Field(min_length=1)]
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    ground_truth: Annotated[str, Field(min_length=1)]
    data_source: str
    row: Count
    """Zero-based line of the data file this prompt came from."""


class Rollout(StrictModel):
    """One sampled response. `token_ids` are what the sampler emitted; `text` is for people and rewards only."""

    prompt_id: Annotated[str, Field(min_length=1)]
    index: Count
    """Position within the prompt's group."""
    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    logprobs: tuple[Annotated[float, Field(allow_inf_nan=False, le=0.0)], ...]
    """Sampler log-probabilities of `token_ids` under softmax(logits / temperature)."""
    temperature: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    finish_reason: FinishReason
    text: str

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> "Rollout":
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"rollout {self.prompt_id}[{self.index}]: {len(self.logprobs)} logprobs, {len(self.token_ids)} tokens"
            )
        return self

    @property
    def truncated(self) -> bool:
        """Whether the response ended for another reason than its own end-of-sequence token."""
        return self.finish_reason != "stop"


class Score(StrictModel):
    """The reward of one response with the parts that decided it, for people to read."""

    index: Count
    reward: FiniteFloat
    correct: bool
    status: Literal["ok", "no_answer", "timeout", "bad_row"]
    extracted: str | None
    canonical: str | None = None
    """The value that was compared, where the scorer has one: a fraction in lowest terms when it is rational."""
    rule: str
    penalty: FiniteFloat = 0.0
    """Soft overlong punishment already included in `reward`."""


class ScoredGroup(StrictModel):
    """All responses of one prompt with their rewards and advantages."""

    prompt_id: Annotated[str, Field(min_length=1)]
    rollouts: Annotated[tuple[Rollout, ...], Field(min_length=1)]
    scores: tuple[Score, ...]
    advantages: tuple[FiniteFloat, ...]
    status: SignalStatus
    reward_mean: FiniteFloat
    reward_std: FiniteFloat

    @model_validator(mode="after")
    def _aligned(self) -> "ScoredGroup":
        counts = {len(self.rollouts), len(self.scores), len(self.advantages)}
        if len(counts) != 1:
            raise ValueError(
                f"group {self.prompt_id}: {len(self.rollouts)} rollouts, {len(self.scores)} scores, "
                f"{len(self.advantages)} advantages; they must be equal"
            )
        for position, (rollout, score) in enumerate(zip(self.rollouts, self.scores, strict=True)):
            if rollout.prompt_id != self.prompt_id or rollout.index != position or score.index != position:
                raise ValueError(f"group {self.prompt_id}: entry {position} belongs to another prompt or position")
        return self


class ResponseLogprobs(StrictModel):
    """Trainer log-probabilities of one response, before the update (and under the reference, when asked)."""

    prompt_id: Annotated[str, Field(min_length=1)]
    index: Count
    old_logprobs: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    reference_logprobs: tuple[FiniteFloat, ...] | None = None
    """Log-probabilities with the adapter disabled; present exactly when `objective.kl_coefficient` > 0."""

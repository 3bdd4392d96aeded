"""The GRPO objective of one response, given normalisers over all responses; pure functions of tensors.

Per token, with ratio r = exp(logp - old) and advantage A (TRL 1.16 `GRPOTrainer._compute_loss`):

    loss = -min(r A, clip(r, 1 - low, 1 + high) A) * min(exp(old - sampler), cap) + beta * k3
    k3   = exp(reference - logp) - (reference - logp) - 1

A response's loss is the sum of its tokens' losses times one weight, so that responses can be replayed one at a time
and their gradients simply add. Masked (truncated) responses are in neither numerator nor denominator.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from longstraw_core.spec.errors import DataRefused
from longstraw_core.spec.records import Rollout, ScoredGroup
from longstraw_core.spec.transaction import ObjectiveSpec


def is_masked(rollout: Rollout, objective: ObjectiveSpec) -> bool:
    """Whether a response is left out of the loss."""
    return objective.mask_truncated and rollout.truncated


def is_trained(group: ScoredGroup, objective: ObjectiveSpec) -> bool:
    """Whether a group carries a signal and at least one response that is not masked."""
    return group.status == "signal" and any(not is_masked(rollout, objective) for rollout in group.rollouts)


@dataclass(frozen=True)
class Normaliser:
    """Counts over every unmasked response of every group with a signal, fixed before the first replay."""

    tokens: int
    responses: int
    max_response_tokens: int

    @classmethod
    def over(
        cls, groups: Sequence[ScoredGroup], objective: ObjectiveSpec, *, max_response_tokens: int
    ) -> "Normaliser | None":
        """Count; None when nothing is left to train on (no signal, or everything masked)."""
        lengths = [
            len(rollout.token_ids)
            for group in groups
            if group.status == "signal"
            for rollout in group.rollouts
            if not is_masked(rollout, objective)
        ]
        if not lengths:
            return None
        return cls(sum(lengths), len(lengths), max_response_tokens)

    def token_weight(self, response_tokens: int, objective: ObjectiveSpec) -> float:
        """Weight of every token loss of a response of `response_tokens` tokens.

        `token_mean`: mean over all tokens. `sequence_mean`: mean over responses of each response's mean.
        `dr_grpo`: sum over responses * max_response_tokens (arXiv 2503.20783, no length bias).
        """
        if objective.aggregation == "token_mean":
            return 1.0 / self.tokens
        if objective.aggregation == "sequence_mean":
            return 1.0 / (self.responses * response_tokens)
        return 1.0 / (self.responses * self.max_response_tokens)


@dataclass
class ObjectiveMetrics:
    """Sums over trained tokens, from which the metrics that people already chart are made (TRL's names)."""

    tokens: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    difference_max: float = 0.0
    importance_min: float = math.inf
    importance_max: float = -math.inf

    def as_dict(self, *, with_reference: bool) -> dict[str, float]:
        """Return the means; empty when no token was trained."""
        if self.tokens == 0:
            return {}
        mean = {name: total / self.tokens for name, total in self.sums.items()}
        metrics = {
            "loss": self.loss,
            "entropy": mean["entropy"],
            "kl_to_old": mean["kl_to_old"],
            "clip_ratio/low_mean": mean["low"],
            "clip_ratio/high_mean": mean["high"],
            "clip_ratio/region_mean": mean["region"],
            "sampling/sampling_logp_difference/mean": mean["difference"],
            "sampling/sampling_logp_difference/max": self.difference_max,
            "sampling/importance_sampling_ratio/mean": mean["importance"],
            "sampling/importance_sampling_ratio/min": self.importance_min,
            "sampling/importance_sampling_ratio/max": self.importance_max,
        }
        if with_reference:
            metrics["kl"] = mean["kl"]
        return metrics


def _vector(values: Sequence[float], count: int, name: str, like: torch.Tensor) -> torch.Tensor:
    if len(values) != count:
        raise DataRefused(f"{len(values)} {name} for {count} response tokens")
    vector = torch.tensor(list(values), dtype=torch.float32, device=like.device)
    if not bool(torch.isfinite(vector).all()):
        raise DataRefused(f"{name} contain a value that is not finite")
    return vector


def response_loss(
    logprobs_R: torch.Tensor,
    entropy_R: torch.Tensor,
    *,
    advantage: float,
    old_logprobs: Sequence[float],
    sampler_logprobs: Sequence[float],
    reference_logprobs: Sequence[float] | None,
    objective: ObjectiveSpec,
    normaliser: Normaliser,
    metrics: ObjectiveMetrics | None = None,
) -> torch.Tensor:
    """Return one unmasked response's contribution to the loss, a scalar attached to `logprobs_R`'s graph.

    Args:
        logprobs_R: log-probabilities under the policy being trained.
        entropy_R: entropies, for the metrics only.
        advantage: the response's advantage.
        old_logprobs: trainer log-probabilities before the update.
        sampler_logprobs: what the sampler reported.
        reference_logprobs: log-probabilities with the adapter off; needed exactly when `kl_coefficient` > 0.
        metrics: sums to add this response to.

    Raises:
        DataRefused: a length differs, a value is not finite, or reference log-probabilities are missing.
    """
    count = logprobs_R.shape[0]
    if not math.isfinite(advantage):
        raise DataRefused(f"advantage is {advantage}: it must be finite")
    old_R = _vector(old_logprobs, count, "old log-probabilities", logprobs_R)
    sampler_R = _vector(sampler_logprobs, count, "sampler log-probabilities", logprobs_R)
    ratio_R = torch.exp(logprobs_R - old_R)
    clipped_R = torch.clamp(ratio_R, 1.0 - objective.clip_low, 1.0 + objective.clip_high)
    token_loss_R = -torch.minimum(ratio_R * advantage, clipped_R * advantage)
    importance_R = torch.exp(old_R - sampler_R)
    if objective.importance_cap is not None:
        importance_R = importance_R.clamp(max=objective.importance_cap)
        token_loss_R = token_loss_R * importance_R
    kl_R = None
    if objective.kl_coefficient > 0.0:
        if reference_logprobs is None:
            raise DataRefused("objective.kl_coefficient is above 0 but reference log-probabilities are missing")
        reference_R = _vector(reference_logprobs, count, "reference log-probabilities", logprobs_R)
        gap_R = reference_R - logprobs_R
        kl_R = torch.exp(gap_R) - gap_R - 1.0
        token_loss_R = token_loss_R + objective.kl_coefficient * kl_R
    loss = token_loss_R.sum() * normaliser.token_weight(count, objective)
    if metrics is not None:
        with torch.no_grad():
            _add_metrics(
                metrics,
                loss,
                logprobs_R,
                entropy_R,
                ratio_R,
                importance_R,
                old_R,
                sampler_R,
                kl_R,
                advantage,
                objective,
            )
    return loss


def _add_metrics(
    metrics: ObjectiveMetrics,
    loss: torch.Tensor,
    logprobs_R: torch.Tensor,
    entropy_R: torch.Tensor,
    ratio_R: torch.Tensor,
    importance_R: torch.Tensor,
    old_R: torch.Tensor,
    sampler_R: torch.Tensor,
    kl_R: torch.Tensor | None,
    advantage: float,
    objective: ObjectiveSpec,
) -> None:
    """Add one response."""
    count = logprobs_R.shape[0]
    low_R = (ratio_R < 1.0 - objective.clip_low) & (advantage < 0)
    high_R = (ratio_R > 1.0 + objective.clip_high) & (advantage > 0)
    difference_R = (old_R - sampler_R).abs()
    gap_R = old_R - logprobs_R
    metrics.tokens += count
    metrics.loss += float(loss)
    sums = {
        "entropy": entropy_R.sum(),
        "kl_to_old": (torch.exp(gap_R) - gap_R - 1.0).sum(),
        "low": low_R.sum(),
        "high": high_R.sum(),
        "region": (low_R | high_R).sum(),
        "difference": difference_R.sum(),
        "importance": importance_R.sum(),
    }
    if kl_R is not None:
        sums["kl"] = kl_R.sum()
    for name, value in sums.items():
        metrics.sums[name] += float(value)
    metrics.difference_max = max(metrics.difference_max, float(difference_R.max()))
    metrics.importance_min = min(metrics.importance_min, float(importance_R.min()))
    metrics.importance_max = max(metrics.importance_max, float(importance_R.max()))

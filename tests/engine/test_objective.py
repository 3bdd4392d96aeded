"""The objective against TRL's batched formulas, written out here on padded tensors, and their torch autograd."""

import math

import pytest
import torch

from longstraw_core.engine.objective import Normaliser, ObjectiveMetrics, is_masked, is_trained, response_loss
from longstraw_core.spec.errors import DataRefused
from longstraw_core.spec.records import FinishReason
from longstraw_core.spec.transaction import ObjectiveSpec
from tests.engine.groups import scored_group

MAX_RESPONSE_TOKENS = 9
LENGTHS = [3, 1, 7, 4]
ADVANTAGES = [1.2, -0.7, -1.1, 0.4]
FINISH: list[FinishReason] = ["stop", "stop", "length", "stop"]


def padded(seed: int, spread: float = 0.6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -1.5 + spread * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)


def trl_loss(
    per_token_logps: torch.Tensor,
    old: torch.Tensor,
    sampler: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    objective: ObjectiveSpec,
) -> tuple[torch.Tensor, dict[str, float]]:
    """GRPOTrainer._compute_loss of TRL 1.16: two-sided clip, truncated importance sampling, then KL, then loss_type."""
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None]
    coef_1 = torch.exp(per_token_logps - old)
    coef_2 = torch.clamp(coef_1, 1 - objective.clip_low, 1 + objective.clip_high)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    ratio = torch.exp(old - sampler)
    if objective.importance_cap is not None:
        ratio = torch.clamp(ratio, max=objective.importance_cap)
        per_token_loss = per_token_loss * ratio
    per_token_kl = torch.exp(reference - per_token_logps) - (reference - per_token_logps) - 1
    per_token_loss = per_token_loss + objective.kl_coefficient * per_token_kl
    rows = mask.any(1)
    if objective.aggregation == "sequence_mean":
        sums = (per_token_loss * mask).sum(-1)[rows] / mask.sum(-1)[rows]
        loss = sums.mean()
    elif objective.aggregation == "token_mean":
        loss = (per_token_loss * mask).sum() / mask.sum()
    else:
        loss = (per_token_loss * mask).sum() / (rows.sum() * MAX_RESPONSE_TOKENS)

    def masked_mean(x: torch.Tensor) -> float:
        return float((x.detach() * mask).sum() / mask.sum())

    is_low = (coef_1 < 1 - objective.clip_low) & (advantages < 0)
    is_high = (coef_1 > 1 + objective.clip_high) & (advantages > 0)
    return loss, {
        "clip_ratio/low_mean": masked_mean(is_low),
        "clip_ratio/high_mean": masked_mean(is_high),
        "clip_ratio/region_mean": masked_mean(is_low | is_high),
        "kl": masked_mean(per_token_kl),
        "sampling/sampling_logp_difference/mean": masked_mean((old - sampler).abs()),
        "sampling/sampling_logp_difference/max": float((old - sampler).abs()[mask].max()),
        "sampling/importance_sampling_ratio/mean": masked_mean(ratio),
        "sampling/importance_sampling_ratio/min": float(ratio[mask].min()),
        "sampling/importance_sampling_ratio/max": float(ratio[mask].max()),
    }


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize("mask_truncated", [True, False])
def test_loss_gradient_and_metrics_equal_trl(
    aggregation: str, kl_coefficient: float, cap: float | None, mask_truncated: bool
) -> None:
    objective = ObjectiveSpec(
        aggregation=aggregation,  # type: ignore[arg-type]
        kl_coefficient=kl_coefficient,
        importance_cap=cap,
        mask_truncated=mask_truncated,
    )
    logps, old, sampler, reference = padded(0).requires_grad_(), padded(1), padded(2), padded(3)
    group = scored_group([1], [[2] * length for length in LENGTHS], ADVANTAGES, finish=FINISH)
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = not (mask_truncated and FINISH[row] == "length")
    expected, expected_metrics = trl_loss(logps, old, sampler, reference, mask, objective)
    expected.backward()

    normaliser = Normaliser.over([group], objective, max_response_tokens=MAX_RESPONSE_TOKENS)
    assert normaliser is not None
    metrics = ObjectiveMetrics()
    ours = logps.detach().float().requires_grad_()
    for row, length in enumerate(LENGTHS):
        if is_masked(group.rollouts[row], objective):
            continue
        response_loss(
            ours[row, :length],
            torch.full((length,), 0.5),
            advantage=ADVANTAGES[row],
            old_logprobs=old[row, :length].tolist(),
            sampler_logprobs=sampler[row, :length].tolist(),
            reference_logprobs=reference[row, :length].tolist(),
            objective=objective,
            normaliser=normaliser,
            metrics=metrics,
        ).backward()
    assert ours.grad is not None
    assert logps.grad is not None
    torch.testing.assert_close(ours.grad.double(), logps.grad, rtol=1e-5, atol=1e-7)
    values = metrics.as_dict(with_reference=kl_coefficient > 0)
    assert values.pop("loss") == pytest.approx(float(expected), rel=1e-5)
    assert values.pop("entropy") == pytest.approx(0.5)
    if kl_coefficient == 0.0:
        del expected_metrics["kl"]
    for name, value in expected_metrics.items():
        assert values[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_k3_to_the_old_policy_is_zero_on_policy_and_nothing_is_clipped() -> None:
    objective = ObjectiveSpec()
    metrics = ObjectiveMetrics()
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = response_loss(
        logprobs,
        torch.zeros(2),
        advantage=2.0,
        old_logprobs=[-1.0, -2.0],
        sampler_logprobs=[-1.0, -2.0],
        reference_logprobs=None,
        objective=objective,
        normaliser=Normaliser(2, 1, 8),
        metrics=metrics,
    )
    assert float(loss) == -2.0
    values = metrics.as_dict(with_reference=False)
    assert values["kl_to_old"] == 0.0
    assert values["clip_ratio/region_mean"] == 0.0
    assert "kl" not in values


def test_normalisers_count_unmasked_responses_of_all_groups_with_a_signal() -> None:
    first = scored_group([1], [[1] * 3, [1] * 5], [1.0, -1.0], finish=["stop", "length"])
    second = scored_group([2], [[1] * 7], [1.0], prompt_id="p1")
    silent = scored_group([3], [[1] * 11], [0.0], status="no_signal", prompt_id="p2")
    objective = ObjectiveSpec()
    normaliser = Normaliser.over([first, second, silent], objective, max_response_tokens=16)
    assert normaliser == Normaliser(tokens=10, responses=2, max_response_tokens=16)
    everything = Normaliser.over([first, silent], ObjectiveSpec(mask_truncated=False), max_response_tokens=16)
    assert everything == Normaliser(tokens=8, responses=2, max_response_tokens=16)
    assert is_trained(first, objective)
    assert not is_trained(silent, objective)


def test_nothing_to_train_on_has_no_normaliser() -> None:
    masked = scored_group([1], [[1], [2]], [1.0, -1.0], finish=["length", "abort"])
    silent = scored_group([1], [[1]], [0.0], status="no_signal")
    assert Normaliser.over([masked, silent], ObjectiveSpec(), max_response_tokens=4) is None
    assert Normaliser.over([], ObjectiveSpec(), max_response_tokens=4) is None
    assert ObjectiveMetrics().as_dict(with_reference=True) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprobs": [-1.0]}, "1 old log-probabilities for 2 response tokens"),
        ({"old_logprobs": [-1.0, math.nan]}, "old log-probabilities contain a value that is not finite"),
        ({"sampler_logprobs": [-1.0, -math.inf]}, "sampler log-probabilities contain"),
        ({"advantage": math.inf}, "advantage is inf"),
        ({"reference_logprobs": None}, "reference log-probabilities are missing"),
        ({"reference_logprobs": [-1.0] * 3}, "3 reference log-probabilities for 2"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "advantage": 1.0,
        "old_logprobs": [-1.0, -1.0],
        "sampler_logprobs": [-1.0, -1.0],
        "reference_logprobs": [-1.0, -1.0],
    }
    with pytest.raises(DataRefused, match=message):
        response_loss(
            torch.tensor([-1.0, -1.0]),
            torch.zeros(2),
            objective=ObjectiveSpec(kl_coefficient=0.1),
            normaliser=Normaliser(2, 1, 8),
            **(arguments | change),  # type: ignore[arg-type]
        )

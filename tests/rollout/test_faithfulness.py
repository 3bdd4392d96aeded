"""Differences between sampler and trainer are measured over the chosen share and judged by the limits."""

import pytest

from longstraw_core.rollout.faithfulness import agreement, check_agreement, compared_responses
from longstraw_core.spec import NumericError, Rollout
from longstraw_core.spec.transaction import FaithfulnessSpec


def rollout(index: int, logprobs: tuple[float, ...] = (-1.0, -2.0)) -> Rollout:
    return Rollout(
        prompt_id="p",
        index=index,
        prompt_token_ids=(1,),
        token_ids=(3,) * len(logprobs),
        logprobs=logprobs,
        temperature=1.0,
        finish_reason="stop",
        text="",
    )


def test_mean_and_largest_difference_over_all_tokens() -> None:
    found = agreement([(rollout(0), (-1.5, -2.0)), (rollout(1, (-3.0,)), (-2.0,))])
    assert (found.responses, found.tokens) == (2, 3)
    assert found.mean == pytest.approx(0.5)
    assert found.max == pytest.approx(1.0)
    assert found.worst == "response p[1] token 0"


def test_limits_are_inclusive_and_named() -> None:
    found = agreement([(rollout(0), (-1.5, -2.0))])
    check_agreement(found, FaithfulnessSpec(mean_limit=0.25, max_limit=0.5))
    with pytest.raises(NumericError, match=r"mean \|Δ log-prob\| is 0.25 .*mean_limit is 0.2 .*p\[0\] token 0"):
        check_agreement(found, FaithfulnessSpec(mean_limit=0.2))
    with pytest.raises(NumericError, match=r"max \|Δ log-prob\| is 0.5 .*max_limit is 0.4"):
        check_agreement(found, FaithfulnessSpec(mean_limit=1.0, max_limit=0.4))


def test_a_value_that_is_not_finite_never_passes() -> None:
    with pytest.raises(NumericError):
        check_agreement(agreement([(rollout(0), (float("nan"), -2.0))]), FaithfulnessSpec(mean_limit=1e6))


@pytest.mark.parametrize("position", [0, 1])
def test_a_nan_stays_the_largest_difference_wherever_it_stands(position: int) -> None:
    values = [-1.5, -2.5]
    values[position] = float("nan")
    found = agreement([(rollout(0), values), (rollout(1), (-9.0, -9.0))])
    assert found.max != found.max
    assert found.worst == f"response p[0] token {position}"


def test_nothing_to_compare_and_unequal_lengths_are_refused() -> None:
    with pytest.raises(NumericError, match="no sampled token"):
        agreement([])
    with pytest.raises(NumericError, match=r"p\[0\]: 1 trainer log-probabilities for 2"):
        agreement([(rollout(0), (-1.0,))])


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.25, 2), (0.26, 3), (1.0, 8)])
def test_a_share_is_rounded_up_and_chosen_by_the_seed(share: float, count: int) -> None:
    group = [rollout(index) for index in range(8)]
    chosen = compared_responses(group, share, seed=3)
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert chosen == compared_responses(group, share, seed=3)
    if count in (2, 3):
        assert any(compared_responses(group, share, seed=seed) != chosen for seed in range(4, 12))

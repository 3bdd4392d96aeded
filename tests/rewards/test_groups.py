"""Advantages agree with TRL's formula; groups without a signal, missing rewards and penalties are handled."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_core.rewards.groups import group_advantages, group_metrics, score_group
from longstraw_core.spec import DataRefused, Prompt, Rollout, ScoredGroup
from longstraw_core.spec.transaction import RewardSpec

PROMPT = Prompt(prompt_id="p", token_ids=(1, 2, 3), ground_truth="42", data_source="math_dapo", row=4)


def rollout(index: int, text: str, tokens: int = 4, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "prompt_id": "p",
        "index": index,
        "prompt_token_ids": (1, 2, 3),
        "token_ids": (7,) * tokens,
        "logprobs": (-0.5,) * tokens,
        "temperature": 1.0,
        "finish_reason": "stop",
        "text": text,
    }
    return Rollout(**(fields | changes))


def scored(*texts: str, reward: RewardSpec | None = None, **changes: Any) -> ScoredGroup:
    rollouts = [rollout(index, text, **changes) for index, text in enumerate(texts)]
    return score_group(PROMPT, rollouts, reward or RewardSpec(), normalize=True)


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=16), st.booleans())
def test_advantages_agree_with_trl(rewards: list[float], normalize: bool) -> None:
    """TRL's GRPOTrainer: rewards.view(-1, G), mean and std over dim 1, divided by std + 1e-4."""
    torch = pytest.importorskip("torch")
    grouped = torch.tensor(rewards, dtype=torch.float64).view(-1, len(rewards))
    expected = grouped - grouped.mean(dim=1, keepdim=True)
    if normalize:
        expected = expected / (grouped.std(dim=1, keepdim=True) + 1e-4)
    result = group_advantages(rewards, normalize=normalize, prompt_id="p")
    assert result.advantages == pytest.approx(expected[0].tolist(), rel=1e-9, abs=1e-9)
    assert result.std == pytest.approx(grouped.std().item(), rel=1e-9, abs=1e-9)
    assert result.mean == pytest.approx(grouped.mean().item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0, 1.0], [0.0], [0.1] * 3, [-1.0] * 7, [1 / 3] * 11])
def test_equal_rewards_give_exactly_zero_and_no_signal(rewards: list[float], normalize: bool) -> None:
    result = group_advantages(rewards, normalize=normalize, prompt_id="p")
    assert result.advantages == (0.0,) * len(rewards)
    assert (result.mean, result.std, result.status) == (rewards[0], 0.0, "no_signal")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([None, None], "prompt p: reward of response 0 is missing"),
        ([1.0, None], "prompt p: reward of response 1 is missing"),
        ([1.0, math.nan], "prompt p: reward of response 1 is nan"),
        ([math.inf, 0.0], "prompt p: reward of response 0 is inf"),
        ([], "prompt p: the group has no responses"),
    ],
)
def test_a_missing_reward_is_refused_and_never_zero(rewards: list[float | None], expected: str) -> None:
    with pytest.raises(DataRefused) as caught:
        group_advantages(rewards, normalize=True, prompt_id="p")
    assert str(caught.value).startswith(expected)


def test_a_mixed_group_is_scored_and_centred() -> None:
    group = scored("Answer: 42", "Answer: 41", "no idea", "Answer: 42")
    assert [score.reward for score in group.scores] == [1.0, -1.0, -1.0, 1.0]
    assert [score.status for score in group.scores] == ["ok", "ok", "no_answer", "ok"]
    assert [score.extracted for score in group.scores] == ["42", "41", None, "42"]
    assert group.status == "signal"
    assert group.advantages[0] == pytest.approx(1 / (math.sqrt(4 / 3) + 1e-4))
    assert math.fsum(group.advantages) == pytest.approx(0.0)


def test_a_group_of_one_has_no_signal() -> None:
    assert (scored("Answer: 42").status, scored("Answer: 42").advantages) == ("no_signal", (0.0,))


def test_the_overlong_penalty_is_part_of_the_reward_and_shown() -> None:
    reward = RewardSpec(overlong_max_tokens=8, overlong_cache_tokens=4)
    group = scored("Answer: 42", "Answer: 41", reward=reward, tokens=6)
    assert [(score.reward, score.penalty) for score in group.scores] == [(0.5, -0.5), (-1.5, -0.5)]


def test_a_truth_that_cannot_be_compared_is_refused_with_its_row() -> None:
    prompt = PROMPT.model_copy(update={"ground_truth": "$$"})
    with pytest.raises(DataRefused, match=r"prompt p \(data row 4\): ground truth '\$\$' is empty after"):
        score_group(prompt, [rollout(0, "Answer: ")], RewardSpec(), normalize=True)


@pytest.mark.parametrize("positions", [[], [1], [0, 0], [1, 0], [0, 2]])
def test_a_missing_or_repeated_response_is_refused(positions: list[int]) -> None:
    with pytest.raises(DataRefused, match="prompt p: responses have positions"):
        score_group(PROMPT, [rollout(index, "x") for index in positions], RewardSpec(), normalize=True)


def test_a_response_to_another_prompt_is_refused() -> None:
    for changes in ({"prompt_id": "q"}, {"prompt_token_ids": (1, 2, 4)}):
        with pytest.raises(DataRefused, match="was not sampled from prompt p"):
            score_group(PROMPT, [rollout(0, "x", **changes)], RewardSpec(), normalize=True)


def test_metrics_carry_trls_names_and_meanings() -> None:
    mixed = score_group(
        PROMPT,
        [
            rollout(0, "Answer: 42", 2),
            rollout(1, "Answer: 41", 4),
            rollout(2, "wandering", 9, finish_reason="length"),
            rollout(3, "", 1),
        ],
        RewardSpec(),
        normalize=True,
    )
    metrics = group_metrics([mixed, scored("Answer: 1", "Answer: 2", tokens=4)])
    assert metrics["reward"] == pytest.approx(-4 / 6)
    assert metrics["reward_std"] == pytest.approx(mixed.reward_std / 2)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/mean_length"] == pytest.approx(24 / 6)
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1.0, 9.0)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["completions/mean_terminated_length"] == pytest.approx(15 / 5)
    assert metrics["completions/max_terminated_length"] == 4.0
    assert (metrics["groups/count"], metrics["groups/skipped"], metrics["groups/solved"]) == (2.0, 1.0, 1.0)
    assert metrics["responses/correct_share"] == pytest.approx(1 / 6)
    assert metrics["responses/no_answer_share"] == pytest.approx(2 / 6)
    assert metrics["responses/timeout_share"] == 0.0


def test_metrics_of_a_wholly_truncated_group_are_finite() -> None:
    metrics = group_metrics([scored("x", "y", finish_reason="length")])
    assert metrics["completions/clipped_ratio"] == 1.0
    assert metrics["completions/mean_terminated_length"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_of_nothing_are_refused() -> None:
    with pytest.raises(DataRefused, match="no scored groups"):
        group_metrics([])

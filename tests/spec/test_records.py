"""Prompts, rollouts and scored groups: what cannot be trained on cannot be constructed."""

import math

import pytest
from pydantic import BaseModel, ValidationError

from longstraw_core.spec import Prompt, ResponseLogprobs, Rollout, Score, ScoredGroup, canonical_json
from longstraw_core.spec.canonical import parse_canonical_json

PROMPT = {"prompt_id": "p0", "token_ids": [1, 2, 3], "ground_truth": "42", "data_source": "test", "row": 0}


def rollout(index: int = 0, **changes: object) -> dict[str, object]:
    """A valid rollout with some fields replaced."""
    return {
        "prompt_id": "p0",
        "index": index,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [5, 6],
        "logprobs": [-0.5, -1.25],
        "temperature": 1.0,
        "finish_reason": "stop",
        "text": "hello",
    } | changes


def score(index: int = 0, **changes: object) -> dict[str, object]:
    """A valid score with some fields replaced."""
    return {
        "index": index,
        "reward": 1.0,
        "correct": True,
        "status": "ok",
        "extracted": "42",
        "rule": "exact",
    } | changes


def group(**changes: object) -> dict[str, object]:
    """A valid group of two with some fields replaced."""
    return {
        "prompt_id": "p0",
        "rollouts": [rollout(0), rollout(1)],
        "scores": [score(0), score(1, reward=-1.0)],
        "advantages": [1.0, -1.0],
        "status": "signal",
        "reward_mean": 0.0,
        "reward_std": 1.0,
    } | changes


def refused(model: type[BaseModel], value: dict[str, object], message: str) -> None:
    """Assert that a model refuses a value with a message."""
    with pytest.raises(ValidationError, match=message):
        model.model_validate(value)


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (Prompt, PROMPT),
        (Rollout, rollout()),
        (Score, score()),
        (ScoredGroup, group()),
        (ResponseLogprobs, {"prompt_id": "p0", "index": 0, "old_logprobs": [-0.5]}),
    ],
)
def test_valid_records_survive_canonical_json(model: type[BaseModel], value: dict[str, object]) -> None:
    record = model.model_validate(value)
    assert model.model_validate(parse_canonical_json(canonical_json(record), name="record")) == record


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused_everywhere(number: float) -> None:
    refused(Rollout, rollout(logprobs=[-0.5, number]), "logprobs.1")
    refused(Rollout, rollout(temperature=number), "temperature")
    refused(Score, score(reward=number), "reward")
    refused(Score, score(penalty=number), "penalty")
    refused(ScoredGroup, group(advantages=[number, 0.0]), "advantages.0")
    refused(ScoredGroup, group(reward_mean=number), "reward_mean")
    refused(ScoredGroup, group(reward_std=number), "reward_std")
    refused(ResponseLogprobs, {"prompt_id": "p0", "index": 0, "old_logprobs": [number]}, "old_logprobs.0")
    refused(
        ResponseLogprobs,
        {"prompt_id": "p0", "index": 0, "old_logprobs": [-1.0], "reference_logprobs": [number]},
        "reference_logprobs",
    )


def test_empty_responses_prompts_and_groups_are_refused() -> None:
    refused(Rollout, rollout(token_ids=[], logprobs=[]), "token_ids")
    refused(Rollout, rollout(prompt_token_ids=[]), "prompt_token_ids")
    refused(Prompt, PROMPT | {"token_ids": []}, "token_ids")
    refused(Prompt, PROMPT | {"ground_truth": ""}, "ground_truth")
    refused(ScoredGroup, group(rollouts=[], scores=[], advantages=[]), "rollouts")
    refused(ResponseLogprobs, {"prompt_id": "p0", "index": 0, "old_logprobs": []}, "old_logprobs")


def test_every_token_has_one_logprob_and_it_is_a_log_of_a_probability() -> None:
    refused(Rollout, rollout(logprobs=[-0.5]), r"1 logprobs.* 2 tokens")
    refused(Rollout, rollout(logprobs=[-0.5, -0.5, -0.5]), r"3 logprobs.* 2 tokens")
    refused(Rollout, rollout(logprobs=[-0.5, 0.1]), "less than or equal to 0")


@pytest.mark.parametrize("token", [-1, 2**31, 1.0, "1", True, None])
def test_token_ids_are_integers_and_nothing_that_looks_like_one(token: object) -> None:
    refused(Rollout, rollout(token_ids=[5, token]), r"token_ids\.1")
    refused(Prompt, PROMPT | {"token_ids": [token]}, r"token_ids\.0")


def test_misaligned_groups_are_refused() -> None:
    refused(ScoredGroup, group(scores=[score(0)]), "2 rollouts, 1 scores, 2 advantages")
    refused(ScoredGroup, group(advantages=[0.0]), "2 rollouts, 2 scores, 1 advantages")
    refused(ScoredGroup, group(rollouts=[rollout(1), rollout(0)]), "entry 0 belongs to another")
    refused(ScoredGroup, group(scores=[score(0), score(0)]), "entry 1 belongs to another")
    refused(ScoredGroup, group(rollouts=[rollout(0), rollout(1, prompt_id="p1")]), "entry 1 belongs to another")


def test_a_missing_reward_is_refused_and_never_zero() -> None:
    refused(Score, score(reward=None), "reward")
    missing = score()
    del missing["reward"]
    refused(Score, missing, "reward")


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True), ("abort", True)])
def test_only_stopped_responses_are_whole(reason: str, truncated: bool) -> None:
    assert Rollout.model_validate(rollout(finish_reason=reason)).truncated is truncated


def test_unknown_fields_and_changes_after_construction_are_refused() -> None:
    refused(Rollout, rollout(reward=1.0), "reward")
    record = Rollout.model_validate(rollout())
    with pytest.raises(ValidationError, match="frozen"):
        record.text = "changed"

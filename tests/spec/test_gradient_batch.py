"""The batch file of `longstraw gradients`: what is accepted, and every fault as one line that says where."""

import json
from typing import Any

import pytest

from longstraw_core.spec import SpecError
from longstraw_core.spec.gradient_batch import parse_gradient_batch

GOOD: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "responses": [
        {"token_ids": [3, 4], "advantage": 0.5, "old_logprobs": [-1.0, -2.0]},
        {"token_ids": [5], "advantage": -1, "old_logprobs": None},
    ],
    "clip": [0.2, 0.28],
    "aggregation": "sequence_mean",
}


def test_a_batch_is_read_as_it_is_written() -> None:
    batch = parse_gradient_batch(json.dumps(GOOD).encode(), "batch.json")
    assert batch.responses[0].old_logprobs == (-1.0, -2.0)
    assert batch.responses[1].old_logprobs is None
    assert batch.clip == (0.2, 0.28)
    short = {"prompt_token_ids": [1], "responses": [{"token_ids": [1], "advantage": 1.0}]}
    defaults = parse_gradient_batch(json.dumps(short).encode(), "batch.json")
    assert (defaults.clip, defaults.aggregation) == ((0.2, 0.2), "sequence_mean")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "batch.json"),
        ('{"prompt_token_ids": [1], "responses": [{"token_ids": [1], "advantage": NaN}]}', "NaN is not a JSON number"),
        ('{"prompt_token_ids": [1], "responses": [{"token_ids": [1], "advantage": Infinity}]}', "Infinity is not"),
        ('{"prompt_token_ids": [1], "responses": [{"token_ids": [1], "advantage": 1e999}]}', "advantage"),
        ('{"prompt_token_ids": [1], "responses": [{"token_ids": [], "advantage": 1}]}', "responses[0].token_ids"),
        ('{"prompt_token_ids": [], "responses": [{"token_ids": [1], "advantage": 1}]}', "prompt_token_ids"),
        ('{"prompt_token_ids": [1], "responses": []}', "responses"),
        ('{"prompt_token_ids": [-1], "responses": [{"token_ids": [1], "advantage": 1}]}', "prompt_token_ids[0]"),
        ('{"prompt_token_ids": [1], "responses": [{"token_ids": ["1"], "advantage": 1}]}', "token_ids[0]"),
        ('{"prompt_token_ids": [1], "responses": [{"advantage": 1}]}', "required field is missing"),
        ('{"prompt_token_ids": [1], "respones": []}', "missing"),
        (json.dumps(GOOD | {"clip": [1.5, 0.2]}), "clip"),
        (json.dumps(GOOD | {"clip": [0.2, 1e39]}), "clip[1]"),
        (json.dumps(GOOD | {"responses": [{"token_ids": [1], "advantage": -1e39}]}), "responses[0].advantage"),
        (
            json.dumps(GOOD | {"responses": [{"token_ids": [1], "advantage": 1, "old_logprobs": [-1e39]}]}),
            "responses[0].old_logprobs[0]",
        ),
        ('{"prompt_token_ids": [1], "prompt_token_ids": [2], "responses": []}', "'prompt_token_ids' appears twice"),
        ('{"responses": [{"token_ids": [1], "advantage": 1, "advantage": 2}]}', "'advantage' appears twice"),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "cannot be read as JSON"),
        ('{"a\\nb\\u001b[31m": 1}', "unknown field 'a\\nb"),
        (json.dumps(GOOD | {"aggregation": "mean"}), "aggregation"),
        (json.dumps(GOOD | {"aggregation": "dr_grpo"}), "max_response_tokens"),
        (
            json.dumps(GOOD | {"responses": [{"token_ids": [1, 2], "advantage": 1, "old_logprobs": [-1.0]}]}),
            "1 old_logprobs for 2 token_ids",
        ),
    ],
)
def test_a_bad_batch_is_one_line(content: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_gradient_batch(content.encode(), "batch.json")
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert text.startswith("batch.json")

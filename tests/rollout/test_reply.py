"""A reply becomes a rollout only when everything in it fits what was asked."""

import copy
import re
from typing import Any

import pytest

from longstraw_core.rollout.reply import Wanted, read_reply, request_body, sample_seed
from longstraw_core.spec import NumericError, Prompt, StageFailed

PROMPT = Prompt(prompt_id="p7", token_ids=(5, 6, 7), ground_truth="1", data_source="math_dapo", row=0)
WANTED = Wanted(PROMPT, index=2, seed=11, max_tokens=4, temperature=0.7, end_tokens=(9,), vocabulary=20)


def reply(tokens: tuple[int, ...] = (1, 2, 9), kind: str = "stop") -> dict[str, Any]:
    return {
        "output_ids": list(tokens),
        "prompt_token_ids": [5, 6, 7],
        "meta_info": {
            "prompt_tokens": 3,
            "completion_tokens": len(tokens),
            "finish_reason": {"type": kind},
            "output_token_logprobs": [[-0.5 - token, token, None] for token in tokens],
        },
    }


@pytest.mark.parametrize(
    ("tokens", "kind", "reason", "truncated"),
    [
        ((1, 2, 9), "stop", "stop", False),
        ((1, 2, 3, 4), "length", "length", True),
        ((1, 2, 3, 9), "length", "stop", False),
        ((1, 2), "abort", "abort", True),
    ],
)
def test_a_fitting_reply_is_a_rollout(tokens: tuple[int, ...], kind: str, reason: str, truncated: bool) -> None:
    rollout = read_reply(WANTED, reply(tokens, kind))
    assert (rollout.prompt_id, rollout.index, rollout.prompt_token_ids) == ("p7", 2, (5, 6, 7))
    assert rollout.token_ids == tokens
    assert rollout.logprobs == tuple(-0.5 - token for token in tokens)
    assert (rollout.finish_reason, rollout.truncated, rollout.temperature) == (reason, truncated, 0.7)


def changed(path: str, value: Any) -> dict[str, Any]:
    content: Any = copy.deepcopy(reply())
    place, parts = content, path.split(".")
    for part in parts[:-1]:
        place = place[int(part)] if part.isdigit() else place[part]
    if value is KeyError:
        del place[parts[-1]]
    else:
        place[int(parts[-1]) if parts[-1].isdigit() else parts[-1]] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("meta_info", KeyError, "no meta_info"),
        ("meta_info.prompt_tokens", 2, "read 2 prompt tokens, 3 were sent; it cut the prompt"),
        ("prompt_token_ids", [5, 6, 8], "has digest .*, sent was"),
        ("prompt_token_ids", KeyError, "has digest nothing"),
        ("output_ids", KeyError, "no output_ids"),
        ("output_ids", [], "returned no tokens"),
        ("output_ids.1", 20, "response token 1 is 20, no id of the vocabulary"),
        ("output_ids.1", True, "response token 1 is True"),
        ("output_ids", [1, 2, 3, 4, 9], "5 response tokens, at most 4"),
        ("meta_info.completion_tokens", 2, "counts 2 response tokens and returned 3"),
        ("meta_info.output_token_logprobs", KeyError, "0 log-probabilities for 3"),
        ("meta_info.output_token_logprobs", [[-1.0, 1, None]], "1 log-probabilities for 3"),
        ("meta_info.output_token_logprobs.2", [-1.0, 8, None], "log-probability 2 is .* not of response token 9"),
        ("meta_info.output_token_logprobs.2", None, "log-probability 2 is None"),
        ("meta_info.finish_reason.type", "length", None),
        ("meta_info.finish_reason", None, "stopped with None after 3 of 4"),
        ("output_ids.0", 9, None),
    ],
)
def test_a_reply_that_does_not_fit_is_refused_with_the_responses_name(path: str, value: Any, message: str) -> None:
    content = changed(path, value)
    if path == "output_ids.0":  # an end token in the middle: the server did not stop there
        content["meta_info"]["output_token_logprobs"][0][1] = 9
        message = r"end tokens \[9\] at positions \[0, 2\]"
    if path.endswith("type"):
        assert read_reply(WANTED, content).finish_reason == "stop"
        return
    with pytest.raises(StageFailed, match=r"response p7\[2\]: .*") as caught:
        read_reply(WANTED, content)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf"), 0.1, "-1", False, -(10**400)])
def test_a_logprob_that_cannot_be_is_a_numeric_error_with_its_position(value: Any) -> None:
    with pytest.raises(NumericError, match=r"response p7\[2\]: log-prob of response token 1"):
        read_reply(WANTED, changed("meta_info.output_token_logprobs.1", [value, 2, None]))


def test_a_certain_token_may_come_out_a_rounding_above_zero() -> None:
    rollout = read_reply(WANTED, changed("meta_info.output_token_logprobs.1", [2e-7, 2, None]))
    assert rollout.logprobs[1] == 0.0


def test_a_stop_without_an_end_token_is_refused() -> None:
    with pytest.raises(StageFailed, match="do not agree"):
        read_reply(WANTED, reply((1, 2, 3), "stop"))
    with pytest.raises(StageFailed, match="do not agree"):
        read_reply(WANTED, reply((1, 2, 3), "length"))


def test_a_request_asks_for_the_plain_distribution_one_response_and_its_own_seed() -> None:
    body = request_body(WANTED, "r1")
    assert body["input_ids"] == [5, 6, 7]
    assert body["lora_path"] == "policy"
    parameters = body["sampling_params"]
    assert (parameters["n"], parameters["sampling_seed"], parameters["temperature"]) == (1, 11, 0.7)
    assert (parameters["top_p"], parameters["top_k"], parameters["min_p"]) == (1.0, -1, 0.0)
    assert parameters["repetition_penalty"] == 1.0
    assert len({sample_seed(2**63 - 3, index) for index in range(8)}) == 8
    assert all(0 <= sample_seed(2**63 - 3, index) < 2**63 for index in range(8))


def test_a_prompt_token_outside_the_vocabulary_is_never_sent() -> None:
    wanted = Wanted(
        PROMPT.model_copy(update={"token_ids": (5, 20)}),
        0,
        1,
        max_tokens=4,
        temperature=1.0,
        end_tokens=(9,),
        vocabulary=20,
    )
    with pytest.raises(StageFailed, match=r"p7\[0\]: prompt token 1 is 20, outside the vocabulary of 20"):
        request_body(wanted, "r1")

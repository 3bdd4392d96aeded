"""What `sample` counts, and the limits of the engine that samples a whole group at once."""

from typing import Any

import pytest

from longstraw_core.artifacts import open_store
from longstraw_core.artifacts.finished_work import finished_name
from longstraw_core.spec import Rollout, StageFailed
from longstraw_core.spec.records import FinishReason
from longstraw_core.stages.sample import sampling_metrics

from .scripted import make_spec, run


def rollout(index: int, tokens: tuple[int, ...], reason: FinishReason = "stop") -> Rollout:
    return Rollout(
        prompt_id="p",
        index=index,
        prompt_token_ids=(1,),
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        temperature=1.0,
        finish_reason=reason,
        text="",
    )


def test_truncated_aborted_and_repeated_responses_are_counted_apart() -> None:
    mixed = [rollout(0, (1, 2)), rollout(1, (1, 2)), rollout(2, (1, 2, 3), "length"), rollout(3, (4,), "abort")]
    identical = [rollout(index, (7, 8)) for index in range(3)]
    assert sampling_metrics([mixed, identical, [rollout(0, (5,))]]) == {
        "sampling/responses": 8.0,
        "sampling/tokens": 15.0,
        "sampling/truncated": 1.0,
        "sampling/aborted": 1.0,
        "sampling/repeated_responses": 3.0,
        "sampling/identical_groups": 1.0,
        "completions/mean_length": 15 / 8,
        "completions/clipped_ratio": 2 / 8,
    }


@pytest.mark.parametrize(
    ("override", "finished", "message"),
    [
        ("sampling.max_total_tokens=24", 1, r"max_total_tokens \(24\) does not suffice: 1 of 2 groups"),
        ("sampling.max_total_tokens=23", 0, r"max_total_tokens \(23\) does not suffice: 0 of 2 groups"),
        ("sampling.timeout_seconds=1.0e-9", 0, r"timeout_seconds \(1e-09 s\) is over with 0 of 2 groups"),
    ],
)
def test_the_limits_of_a_transaction_keep_the_groups_that_are_finished(
    spec_fields: dict[str, Any], override: str, finished: int, message: str
) -> None:
    spec = make_spec(spec_fields, override)
    run(spec, "audit_data")
    run(spec, "export_lora")
    with pytest.raises(StageFailed, match=message):
        run(spec, "sample")
    store = open_store(spec.storage.uri)
    assert [store.exists(finished_name("small", 1, "sample", number)) for number in range(2)] == [
        number < finished for number in range(2)
    ]

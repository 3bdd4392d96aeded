"""A team's own reward runs in killable workers: it may print, raise, hang and die, and is refused early when absent."""

import fcntl
import time
from pathlib import Path

import pytest

from longstraw_core.rewards.plug_in import PlugInScorer
from longstraw_core.rewards.scoring import check_reward, open_scorer
from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import RewardSpec

HERE = "tests.rewards.plug_ins.sample"


def scorer(function: str, deadline_seconds: float = 60.0) -> PlugInScorer:
    return PlugInScorer(f"{HERE}:{function}", deadline_seconds=deadline_seconds, workers=1)


def test_a_number_is_the_score_and_printing_disturbs_nobody() -> None:
    with scorer("shorter_is_better") as plug_in:
        long, short = plug_in.judge([("x" * 97, "42"), ("x", "42")])
    assert (long.reward, short.reward) == (0.01, 0.25)
    assert (short.correct, short.status, short.rule) == (True, "ok", f"python:{HERE}:shorter_is_better")


def test_a_mapping_carries_all_parts() -> None:
    with scorer("contains") as plug_in:
        found, missing, bad = plug_in.judge([("it is 42", "42"), ("it is 41", "42"), ("x", " ")])
    assert (found.reward, found.correct, found.extracted) == (2.0, True, "42")
    assert found.rule == f"python:{HERE}:contains:contains"
    assert (missing.reward, missing.correct) == (-2.0, False)
    assert bad.status == "bad_row"


def test_one_bad_response_changes_no_other_score() -> None:
    texts = ["fine", "raise", "die", "hang", "nan", "text", "unknown", "none", "fine"]
    with scorer("moody", deadline_seconds=3.0) as plug_in:
        verdicts = plug_in.judge([(text, "42") for text in texts])
    assert [verdict.status for verdict in verdicts] == [
        "ok", "no_answer", "timeout", "timeout", "no_answer", "no_answer", "no_answer", "no_answer", "ok",
    ]  # fmt: skip
    assert [verdict.reward for verdict in verdicts] == [1.0, *[-1.0] * 7, 1.0]
    assert verdicts[1].rule.endswith("raised RuntimeError: no thanks")
    assert verdicts[2].rule.endswith("worker_died")
    assert verdicts[3].rule.endswith("deadline")
    assert "finite number" in verdicts[4].rule
    assert "unknown key 'points'" in verdicts[6].rule


def test_a_function_that_raises_on_every_response_stops_the_stage() -> None:
    with (
        scorer("moody") as plug_in,
        pytest.raises(SpecError, match="raised on every response: RuntimeError: no thanks"),
    ):
        plug_in.judge([("raise", "1"), ("raise", "2")])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tests.rewards.plug_ins.nowhere:score", "no module named tests.rewards.plug_ins.nowhere"),
        (f"{HERE}:absent", "has no function absent"),
        (f"{HERE}:not_a_function", "has no function not_a_function"),
    ],
)
def test_a_missing_function_is_an_error_of_the_specification_before_any_work(function: str, message: str) -> None:
    reward = RewardSpec(kind="python", function=function)
    with pytest.raises(SpecError, match=message):
        check_reward(reward)
    with pytest.raises(SpecError, match=message), open_scorer(reward):
        raise AssertionError("must not be reached")


@pytest.mark.parametrize("function", ["os.system", "os:system()", ":f", "a b:c", "../x:y", "a:b:c"])
def test_only_a_dotted_name_is_a_function(function: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        RewardSpec(kind="python", function=function)


def test_function_and_kind_belong_together() -> None:
    with pytest.raises(ValueError, match=r"needs reward\.function"):
        RewardSpec(kind="python")
    with pytest.raises(ValueError, match="only for kind python"):
        RewardSpec(kind="math_verify", function="a:b")


def test_a_child_that_a_function_leaves_behind_answers_for_nobody() -> None:
    with scorer("forks") as plug_in:
        first, second = plug_in.judge([("fork", "42"), ("x", "42")])
    assert (first.reward, second.reward) == (0.5, -0.9)


def test_what_a_function_started_ends_with_its_worker(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.touch()
    with locked.open("rb") as file:
        with scorer("leaves_a_child") as plug_in:
            (verdict,) = plug_in.judge([(str(locked), "42")])
            assert verdict.reward == 1.0
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _ in range(300):  # the kernel releases the lock of a killed process a moment later
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)
    pytest.fail("the child is still alive")


def test_a_number_of_another_library_is_a_number() -> None:
    with scorer("numpy_number") as plug_in:
        (verdict,) = plug_in.judge([("x", "42")])
    assert (verdict.reward, verdict.correct, verdict.status) == (0.5, True, "ok")

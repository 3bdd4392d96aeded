"""A session's phases have one order; anything else is refused before it happens."""

import pytest

from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.session import FOLLOWS, PhaseOrderError, TrainingSession


def session_after(*phases: str) -> TrainingSession:
    session = TrainingSession(Ranks.alone())
    for name in phases:
        with session.phase(name):
            pass
    return session


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        ((), "replay"),
        (("load",), "optimizer_step"),
        (("load", "restore", "replay"), "optimizer_step"),
        (("load", "restore", "replay", "finalise", "optimizer_step"), "replay"),
        (("load", "restore", "replay", "finalise", "optimizer_step"), "optimizer_step"),
        (("load", "release"), "load"),
    ],
)
def test_a_phase_out_of_order_is_refused_and_its_body_not_run(before: tuple[str, ...], phase: str) -> None:
    session = session_after(*before)
    words = f"phase {phase} cannot follow {before[-1] if before else 'start'}; "
    with pytest.raises(PhaseOrderError, match=words), session.phase(phase):
        raise AssertionError("it ran")
    assert session.sequence == list(before)


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(PhaseOrderError, match="unknown phase 'warm up'"), session_after("load").phase("warm up"):
        raise AssertionError("it ran")


def test_every_phase_can_be_reached_and_leads_to_release() -> None:
    reached, waiting = set(), ["start"]
    while waiting:
        now = waiting.pop()
        if now not in reached:
            reached.add(now)
            waiting.extend(FOLLOWS[now])
    assert reached == set(FOLLOWS)
    assert [phase for phase, following in FOLLOWS.items() if not following] == ["release"]


def test_repetitions_are_one_entry_of_the_sequence() -> None:
    session = session_after("load", "restore", "replay", "replay", "replay", "finalise", "optimizer_step", "checkpoint")
    assert session.sequence == ["load", "restore", "replay", "finalise", "optimizer_step", "checkpoint"]

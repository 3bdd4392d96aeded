"""What must agree between the ranks of a transaction before anything is published."""

from collections.abc import Callable
from typing import Any

import pytest

from longstraw_core.spec import NumericError, StageFailed, sha256_digest
from longstraw_core.spec.rank_sessions import (
    PROJECTION_SIZE,
    GradientWitness,
    Placement,
    RankSession,
    RankSessions,
    StateDigests,
    check_agreement,
)


def witness(norm: float) -> GradientWitness:
    return GradientWitness(group="gate_up_proj.lora_A", tensors=2, norm=norm, projection=(norm,) * PROJECTION_SIZE)


def session(rank: int, shard: int) -> RankSession:
    place = Placement(host="here", rank=rank, device="cpu", accelerator=None)
    state = StateDigests(
        adapter=sha256_digest(b"adapter"), optimizer=sha256_digest(b"moments"), experts=sha256_digest(bytes([shard]))
    )
    return RankSession(
        rank=rank,
        planned=place,
        observed=place,
        phases=("load", "replay"),
        before=state,
        after=state,
        witnesses=(witness(1.0),),
        expert_witnesses=(witness(2.0 + shard),),
        peak_memory_bytes=1,
    )


def of_four(change: Callable[[RankSession], RankSession] = lambda session: session) -> RankSessions:
    """Four ranks, of which 0 and 2 hold one half of the experts and 1 and 3 the other; `change` applies to the last."""
    sessions = [session(rank, rank % 2) for rank in range(4)]
    sessions[3] = change(sessions[3])
    return RankSessions(run="r", transaction=1, context_parallel=4, expert_parallel=2, sessions=tuple(sessions))


def test_ranks_that_hold_other_experts_need_not_agree_on_them() -> None:
    check_agreement(of_four())


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_that_hold_the_same_experts_must_agree_on_them(when: str) -> None:
    def change(last: RankSession) -> RankSession:
        other = getattr(last, when).model_copy(update={"experts": sha256_digest(b"other")})
        return last.model_copy(update={when: other})

    with pytest.raises(NumericError, match=rf"experts' adapter {when} the step .* on rank 3 and .* on rank 1"):
        check_agreement(of_four(change))


@pytest.mark.parametrize(
    ("changed", "other"), [({"expert_witnesses": (witness(9.0),)}, 1), ({"witnesses": (witness(9.0),)}, 0)]
)
def test_gradients_that_should_be_equal_must_be(changed: dict[str, Any], other: int) -> None:
    with pytest.raises(NumericError, match=rf"gate_up_proj.lora_A differs between rank 3 and rank {other}"):
        check_agreement(of_four(lambda last: last.model_copy(update=changed)))


@pytest.mark.parametrize(("changed", "other"), [({"expert_witnesses": ()}, 1), ({"witnesses": ()}, 0)])
def test_a_rank_without_gradients_that_others_have_is_named(changed: dict[str, Any], other: int) -> None:
    with pytest.raises(NumericError, match=rf"rank 3 has gradients of 0 groups and rank {other} of 1"):
        check_agreement(of_four(lambda last: last.model_copy(update=changed)))


def placed(last: RankSession, **fields: Any) -> RankSession:
    return last.model_copy(update={"observed": last.observed.model_copy(update=fields)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda last: last.model_copy(update={"rank": 2}), r"ranks \[0, 1, 2, 2\] reported, expected 0 to 3"),
        (lambda last: placed(last, device="cuda:1"), "rank 3 was planned on here cpu, it ran as rank 3 on here cuda:1"),
        (lambda last: placed(last, host="there"), "rank 3 was planned on here cpu, it ran as rank 3 on there cpu"),
        (
            lambda last: last.model_copy(update={"phases": ("load", "replay", "replay")}),
            "rank 3 went through load → replay → replay, rank 0 through load → replay",
        ),
    ],
)
def test_ranks_elsewhere_doubled_or_on_another_way_fail_the_stage(
    change: Callable[[RankSession], RankSession], words: str
) -> None:
    with pytest.raises(StageFailed, match=words):
        check_agreement(of_four(change))


def test_two_ranks_on_one_accelerator_fail_the_stage() -> None:
    record = of_four()
    shared = tuple(placed(last, accelerator=f"GPU-{max(last.rank, 1)}") for last in record.sessions)
    with pytest.raises(StageFailed, match="ranks 0 and 1 share accelerator GPU-1"):
        check_agreement(record.model_copy(update={"sessions": shared}))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["adapter", "optimizer"])
def test_states_that_all_ranks_have_must_be_equal(what: str, when: str) -> None:
    def change(last: RankSession) -> RankSession:
        other = getattr(last, when).model_copy(update={what: sha256_digest(b"other")})
        return last.model_copy(update={when: other})

    with pytest.raises(NumericError, match=rf"{what} {when} the step .* on rank 3 and .* on rank 0"):
        check_agreement(of_four(change))

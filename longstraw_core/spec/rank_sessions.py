"""What every rank of a stage reports about its session, and what must agree between ranks. Knows no torch."""

from typing import Annotated, Literal

from pydantic import Field

from longstraw_core.spec.errors import NumericError, StageFailed
from longstraw_core.spec.model import Count, FiniteFloat, PositiveCount, Sha256, StrictModel

PROJECTION_SIZE = 64


class Placement(StrictModel):
    """Where a rank runs."""

    host: str
    rank: Count
    device: str
    """`cpu` or `cuda:N`."""
    accelerator: str | None
    """Identity of the device that no other device has, None for a CPU or when it was only planned."""


class GradientWitness(StrictModel):
    """A bounded trace of the finalised gradient of one group of tensors."""

    group: str
    """Kind of module and factor, such as `q_proj.lora_A`, all layers together."""
    tensors: PositiveCount
    norm: Annotated[FiniteFloat, Field(ge=0.0)]
    projection: Annotated[tuple[FiniteFloat, ...], Field(min_length=PROJECTION_SIZE, max_length=PROJECTION_SIZE)]
    """Products with seeded random directions: two gradients with equal projections are equal, but for chance."""


class StateDigests(StrictModel):
    """Digests of what a rank trains."""

    adapter: Sha256
    """Of the tensors that every rank has."""
    optimizer: Sha256
    """Of their moments."""
    experts: Sha256 | None = None
    """Of the tensors and moments of the experts that only some ranks hold."""


class RankSession(StrictModel):
    """One rank's account of its session."""

    rank: Count
    planned: Placement
    observed: Placement
    phases: tuple[str, ...]
    """The phases in the order they were entered; one entry however often a phase was repeated in a row."""
    before: StateDigests
    after: StateDigests
    witnesses: tuple[GradientWitness, ...]
    """Of the gradients that every rank has; empty when no step was taken."""
    expert_witnesses: tuple[GradientWitness, ...] = ()
    peak_memory_bytes: Count


class RankSessions(StrictModel):
    """The sessions of all ranks: `rank-sessions.json`."""

    kind: Literal["longstraw.rank-sessions/1"] = "longstraw.rank-sessions/1"
    run: str
    transaction: PositiveCount
    context_parallel: PositiveCount
    expert_parallel: PositiveCount
    sessions: Annotated[tuple[RankSession, ...], Field(min_length=1)]


def check_agreement(record: RankSessions) -> None:
    """Check what must hold between the ranks of one transaction.

    Raises:
        StageFailed: ranks are missing or doubled, run elsewhere than planned, share a device, or went through other
            phases.
        NumericError: ranks hold different adapters, optimizer states or gradients.
    """
    sessions = record.sessions
    ranks = [session.rank for session in sessions]
    if ranks != list(range(record.context_parallel)):
        raise StageFailed(
            f"rank sessions: ranks {ranks} reported, expected 0 to {record.context_parallel - 1} in order"
        )
    for session in sessions:
        planned, observed = session.planned, session.observed
        if (planned.rank, planned.host, planned.device) != (observed.rank, observed.host, observed.device):
            raise StageFailed(
                f"rank sessions: rank {session.rank} was planned on {planned.host} {planned.device}, "
                f"it ran as rank {observed.rank} on {observed.host} {observed.device}"
            )
    used: dict[str, int] = {}
    for session in sessions:
        accelerator = session.observed.accelerator
        if accelerator is not None and accelerator in used:
            raise StageFailed(
                f"rank sessions: ranks {used[accelerator]} and {session.rank} share accelerator {accelerator}"
            )
        if accelerator is not None:
            used[accelerator] = session.rank
    first = sessions[0]
    for session in sessions[1:]:
        if session.phases != first.phases:
            raise StageFailed(
                f"rank sessions: rank {session.rank} went through {' → '.join(session.phases)}, "
                f"rank 0 through {' → '.join(first.phases)}"
            )
        for when in ("before", "after"):
            for what in ("adapter", "optimizer"):
                mine, other = getattr(getattr(session, when), what), getattr(getattr(first, when), what)
                if mine != other:
                    raise NumericError(
                        f"rank sessions: {what} {when} the step is {mine} on rank {session.rank} "
                        f"and {other} on rank 0: nothing was published"
                    )
        _check_gradients(session.rank, session.witnesses, 0, first.witnesses)
        holder = sessions[session.rank % record.expert_parallel]  # the first rank with the same experts
        for when in ("before", "after"):
            mine, other = getattr(session, when).experts, getattr(holder, when).experts
            if mine != other:
                raise NumericError(
                    f"rank sessions: the experts' adapter {when} the step is {mine} on rank {session.rank} "
                    f"and {other} on rank {holder.rank}, which hold the same experts: nothing was published"
                )
        _check_gradients(session.rank, session.expert_witnesses, holder.rank, holder.expert_witnesses)


def _check_gradients(
    rank: int, witnesses: tuple[GradientWitness, ...], other: int, expected: tuple[GradientWitness, ...]
) -> None:
    if len(witnesses) != len(expected):
        raise NumericError(
            f"rank sessions: rank {rank} has gradients of {len(witnesses)} groups and rank {other} of "
            f"{len(expected)}: nothing was published"
        )
    for mine, theirs in zip(witnesses, expected, strict=True):
        if mine != theirs:
            raise NumericError(
                f"rank sessions: gradient of {mine.group} differs between rank {rank} and rank {other}: "
                "nothing was published"
            )

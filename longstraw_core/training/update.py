"""One transaction's update: replay every response, sweep every prompt, finalise once, step once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw_core.engine.objective import Normaliser, ObjectiveMetrics, is_masked, is_trained, response_loss
from longstraw_core.engine.policy import Policy
from longstraw_core.resident.prefix_state import PrefixState
from longstraw_core.spec.errors import DataRefused, NumericError, SpecError
from longstraw_core.spec.receipts import Phase
from longstraw_core.spec.records import ResponseLogprobs, ScoredGroup
from longstraw_core.spec.transaction import ObjectiveSpec
from longstraw_core.training.optimizer import AdapterOptimizer
from longstraw_core.training.phases import PhaseClock

UpdateProgress = Callable[[str, int, int], None]
"""Called with (phase, done, in all): `replay` counts responses, `reverse_sweep` prompt tokens of one group."""


@dataclass(frozen=True)
class UpdateGroup:
    """One prompt's group, the log-probabilities of its responses, and how to obtain the prompt's state.

    `open_state` is called at most once, only when the group is trained; the update releases what it returns before
    it opens the next one.
    """

    group: ScoredGroup
    logprobs: Sequence[ResponseLogprobs]
    open_state: Callable[[], PrefixState]


@dataclass(frozen=True)
class UpdateResult:
    """What the update did."""

    stepped: bool
    status: Literal["stepped", "no_signal", "all_masked"]
    metrics: dict[str, float]
    phases: tuple[Phase, ...]


def accumulate_gradients(
    policy: Policy,
    groups: Sequence[UpdateGroup],
    *,
    objective: ObjectiveSpec,
    normaliser: Normaliser,
    metrics: ObjectiveMetrics,
    clock: PhaseClock,
    progress: UpdateProgress | None = None,
    opening: str = "restore",
) -> None:
    """Add the gradient of the whole objective to the parameters' `.grad`, one group and one response at a time.

    Raises:
        NumericError: a loss is not finite; names group and response.
        IntegrityError: a replay changed the prompt state, or `open_state` found damaged files.
    """
    trained = [group for group in groups if is_trained(group.group, objective)]
    total = sum(not is_masked(rollout, objective) for entry in trained for rollout in entry.group.rollouts)
    done = 0
    for entry in trained:
        group = entry.group
        with clock.phase(opening):
            state = entry.open_state()
        try:
            if state.prompt_token_ids != group.rollouts[0].prompt_token_ids:
                raise DataRefused(f"group {group.prompt_id}: the prompt state was captured from another prompt")
            for rollout, advantage, logprobs in zip(group.rollouts, group.advantages, entry.logprobs, strict=True):
                if is_masked(rollout, objective):
                    continue
                with clock.phase("replay"):
                    replayed = policy.replay(state, rollout.token_ids, temperature=rollout.temperature)
                    loss = response_loss(
                        replayed.logprobs_R,
                        replayed.entropy_R,
                        advantage=advantage,
                        old_logprobs=logprobs.old_logprobs,
                        sampler_logprobs=rollout.logprobs,
                        reference_logprobs=logprobs.reference_logprobs,
                        objective=objective,
                        normaliser=normaliser,
                        metrics=metrics,
                    )
                    if not bool(torch.isfinite(loss)):
                        raise NumericError(
                            f"group {group.prompt_id}, response {rollout.index}: loss is {float(loss.detach())}: "
                            "no optimizer step was taken"
                        )
                    loss.backward()
                    state.verify_witness()
                    del replayed, loss  # or this response's graph would live beside the next one's
                done += 1
                if progress is not None:
                    progress("replay", done, total)
            if objective.gradient == "exact":
                with clock.phase("reverse_sweep"):
                    policy.reverse_sweep(
                        state,
                        progress=None
                        if progress is None
                        else lambda swept, tokens: progress("reverse_sweep", swept, tokens),
                    )
        finally:
            state.release()


def run_update(
    policy: Policy,
    groups: Sequence[UpdateGroup],
    *,
    objective: ObjectiveSpec,
    optimizer: AdapterOptimizer,
    max_response_tokens: int,
    progress: UpdateProgress | None = None,
    clock: PhaseClock | None = None,
    opening: str = "restore",
    before_step: Callable[[], None] | None = None,
) -> UpdateResult:
    """Run one update; either exactly one optimizer step is taken or none.

    Args:
        policy: what replays and sweeps.
        groups: one entry per prompt.
        objective: the loss.
        optimizer: accumulates and steps; over several ranks it also sums.
        max_response_tokens: normaliser of `dr_grpo`.
        progress: told what is done.
        clock: times the phases; a training session also refuses them out of order.
        opening: phase in which a prompt's state is obtained, `restore` or `capture`.
        before_step: called with the finalised gradients in place.

    Raises:
        SpecError: the policy was built for another gradient mode.
        DataRefused: groups and log-probabilities disagree.
        NumericError: a loss or a gradient is not finite; the optimizer was not called and gradients are dropped.
    """
    if policy.gradient != objective.gradient:
        raise SpecError(f"policy computes {policy.gradient} gradients, the objective asks for {objective.gradient}")
    for entry in groups:
        _check_aligned(entry, objective)
    normaliser = Normaliser.over([entry.group for entry in groups], objective, max_response_tokens=max_response_tokens)
    if normaliser is None:
        any_signal = any(entry.group.status == "signal" for entry in groups)
        return UpdateResult(False, "all_masked" if any_signal else "no_signal", {}, ())
    clock = clock or PhaseClock(policy.pool.device)
    metrics = ObjectiveMetrics()
    optimizer.clear_gradients()
    try:
        with optimizer.accumulating():
            accumulate_gradients(
                policy,
                groups,
                objective=objective,
                normaliser=normaliser,
                metrics=metrics,
                clock=clock,
                progress=progress,
                opening=opening,
            )
        with clock.phase("finalise"):
            gradient_norm = optimizer.finalise_gradients()
            if before_step is not None:
                before_step()
        learning_rate = optimizer.learning_rate
        with clock.phase("optimizer_step"):
            optimizer.step()
    finally:
        optimizer.clear_gradients()
    values = metrics.as_dict(with_reference=objective.kl_coefficient > 0.0)
    values |= {
        "grad_norm": gradient_norm,
        "learning_rate": learning_rate,
        "trained_tokens": float(normaliser.tokens),
        "trained_responses": float(normaliser.responses),
    }
    return UpdateResult(True, "stepped", values, clock.phases())


def _check_aligned(entry: UpdateGroup, objective: ObjectiveSpec) -> None:
    """Check that log-probabilities and rollouts of a group belong together, before anything is computed."""
    group = entry.group
    if len(entry.logprobs) != len(group.rollouts):
        raise DataRefused(
            f"group {group.prompt_id}: {len(entry.logprobs)} log-probability records "
            f"for {len(group.rollouts)} responses"
        )
    for rollout, logprobs in zip(group.rollouts, entry.logprobs, strict=True):
        where = f"group {group.prompt_id}, response {rollout.index}"
        if (logprobs.prompt_id, logprobs.index) != (group.prompt_id, rollout.index):
            raise DataRefused(f"{where}: log-probabilities belong to {logprobs.prompt_id}[{logprobs.index}]")
        if rollout.prompt_token_ids != group.rollouts[0].prompt_token_ids:
            raise DataRefused(f"{where}: was sampled from another prompt than response 0")
        if len(logprobs.old_logprobs) != len(rollout.token_ids):
            raise DataRefused(
                f"{where}: {len(logprobs.old_logprobs)} old log-probabilities for {len(rollout.token_ids)} tokens"
            )
        if objective.kl_coefficient > 0.0:
            if logprobs.reference_logprobs is None:
                raise DataRefused(f"{where}: reference log-probabilities are missing and kl_coefficient is above 0")
            if len(logprobs.reference_logprobs) != len(rollout.token_ids):
                raise DataRefused(
                    f"{where}: {len(logprobs.reference_logprobs)} reference log-probabilities "
                    f"for {len(rollout.token_ids)} tokens"
                )

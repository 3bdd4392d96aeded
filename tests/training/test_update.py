"""One update against conventional training: AdamW deltas, metrics, no signal, and values that must stop the step."""

from collections.abc import Callable, Sequence

import pytest
import torch
from peft import PeftModel

from longstraw_core.engine.policy import Policy
from longstraw_core.resident import PrefixState
from longstraw_core.spec.errors import DataRefused, IntegrityError, NumericError, SpecError
from longstraw_core.spec.records import FinishReason, ScoredGroup
from longstraw_core.spec.transaction import LayoutSpec, ObjectiveSpec, OptimizerSpec
from longstraw_core.training.lora import trainable_parameters
from longstraw_core.training.optimizer import SingleProcessOptimizer
from longstraw_core.training.update import UpdateGroup, run_update
from tests.engine import glm_oracle
from tests.engine.groups import records, scored_group
from tests.engine.oracle import Batch, full_logprobs, random_batch, tiny_policy_model

LAYOUT = LayoutSpec(prompt_chunk_tokens=20, page_tokens=8)
BATCHES = [random_batch(50, [9, 4, 12], seed=3), random_batch(33, [5, 5], seed=4)]


@pytest.fixture
def model() -> PeftModel:
    return tiny_policy_model()


def capture_of(policy: Policy, batch: Batch) -> Callable[[], PrefixState]:
    return lambda: policy.capture(batch.prompt, adapter=policy.captures_with_adapter)


def update_groups(policy: Policy, batches: Sequence[Batch], off_policy: float = 0.0) -> list[UpdateGroup]:
    """Groups whose old log-probabilities are the policy's own (plus noise), as the old_logprobs stage computes them."""
    generator = torch.Generator().manual_seed(9)
    groups = []
    for number, batch in enumerate(batches):
        state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
        with torch.no_grad():
            old = [policy.replay(state, response, temperature=1.0).logprobs_R for response in batch.responses]
        state.release()
        noisy = [(x + off_policy * torch.randn(x.shape, generator=generator)).clamp(max=0.0) for x in old]
        group = scored_group(
            batch.prompt,
            batch.responses,
            batch.advantages,
            sampler_logprobs=[x.clamp(max=0.0).tolist() for x in old],
            prompt_id=f"p{number}",
        )
        groups.append(UpdateGroup(group, records(group, [x.tolist() for x in noisy]), capture_of(policy, batch)))
    return groups


def conventional_step(
    model: PeftModel, optimizer: torch.optim.Optimizer, groups: Sequence[UpdateGroup], objective: ObjectiveSpec
) -> float:
    """Full sequences, token mean, one AdamW step with gradient clipping by torch."""
    optimizer.zero_grad()
    tokens = sum(len(rollout.token_ids) for entry in groups for rollout in entry.group.rollouts)
    for entry in groups:
        for rollout, record, advantage in zip(
            entry.group.rollouts, entry.logprobs, entry.group.advantages, strict=True
        ):
            logprobs_R = full_logprobs(model, rollout.prompt_token_ids, rollout.token_ids)
            old_R = torch.tensor(record.old_logprobs)
            ratio_R = torch.exp(logprobs_R - old_R)
            clipped_R = ratio_R.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            weight_R = torch.exp(old_R - torch.tensor(rollout.logprobs)).clamp(max=objective.importance_cap)
            (-torch.min(ratio_R * advantage, clipped_R * advantage) * weight_R).sum().div(tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(norm)


@pytest.mark.parametrize(
    ("build", "epsilon"), [(tiny_policy_model, 1e-8), (glm_oracle.tiny_policy_model, 1e-6)], ids=["hybrid", "glm"]
)
def test_one_and_five_adamw_steps_equal_conventional_training(build: Callable[[], PeftModel], epsilon: float) -> None:
    """GLM with its routed experts' LoRA.

    The first step divides a gradient by its own size plus epsilon. Of GLM's 34,688 elements one is 6e-9 and one 8e-8:
    below an epsilon of 1e-8, AdamW turns their rounding (1e-6 of their tensor's norm) into a fortieth of a step.
    """
    model, reference = build(), build()
    start = {name: value.detach().clone() for name, value in trainable_parameters(model).items()}
    spec = OptimizerSpec(learning_rate=1e-3, weight_decay=0.01, warmup_steps=3, epsilon=epsilon)
    objective = ObjectiveSpec()
    optimizer = SingleProcessOptimizer(model, spec)
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1.0, eps=epsilon, weight_decay=0.01)
    policy = Policy(model, LAYOUT, gradient="exact")
    for step in range(5):
        groups = update_groups(policy, BATCHES, off_policy=0.2)
        result = run_update(policy, groups, objective=objective, optimizer=optimizer, max_response_tokens=16)
        adamw.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 3)
        norm = conventional_step(reference, adamw, groups, objective)
        assert result.stepped
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert result.metrics["learning_rate"] == pytest.approx(adamw.param_groups[0]["lr"])
        if step in (0, 4):
            ours, theirs = trainable_parameters(model), trainable_parameters(reference)
            delta = sum(float((theirs[name].detach() - start[name]).pow(2).sum()) for name in start) ** 0.5
            error = sum(float((theirs[name] - ours[name]).detach().pow(2).sum()) for name in start) ** 0.5
            assert error / delta <= 1e-4


def test_metrics_phases_and_progress(model: PeftModel) -> None:
    policy = Policy(model, LAYOUT, gradient="exact")
    optimizer = SingleProcessOptimizer(model, OptimizerSpec())
    calls: list[tuple[str, int, int]] = []
    result = run_update(
        policy,
        update_groups(policy, BATCHES),
        objective=ObjectiveSpec(),
        optimizer=optimizer,
        max_response_tokens=16,
        progress=lambda *call: calls.append(call),
    )
    assert result.status == "stepped"
    assert [call for call in calls if call[0] == "replay"] == [("replay", done, 5) for done in range(1, 6)]
    assert ("reverse_sweep", 49, 49) in calls
    assert [phase.name for phase in result.phases] == [
        "restore",
        "replay",
        "reverse_sweep",
        "finalise",
        "optimizer_step",
    ]
    assert result.metrics["clip_ratio/region_mean"] == 0.0
    assert result.metrics["kl_to_old"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["trained_tokens"] == 35.0
    assert policy.pool.used_bytes == 0
    assert all(parameter.grad is None for parameter in optimizer.parameters.values())


@pytest.mark.parametrize("mode", ["stopgrad", "response_adapter"])
def test_modes_without_a_sweep_have_no_such_phase(model: PeftModel, mode: str) -> None:
    policy = Policy(model, LAYOUT, gradient=mode)  # type: ignore[arg-type]
    result = run_update(
        policy,
        update_groups(policy, BATCHES[:1]),
        objective=ObjectiveSpec(gradient=mode),  # type: ignore[arg-type]
        optimizer=SingleProcessOptimizer(model, OptimizerSpec()),
        max_response_tokens=16,
    )
    assert "reverse_sweep" not in [phase.name for phase in result.phases]


def weights_of(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainable_parameters(model).items()}


@pytest.mark.parametrize(
    ("finish", "signal", "status"),
    [(["stop", "stop"], "no_signal", "no_signal"), (["length", "abort"], "signal", "all_masked")],
)
def test_nothing_to_learn_from_takes_no_step_and_opens_no_state(
    model: PeftModel, finish: list[FinishReason], signal: str, status: str
) -> None:
    before = weights_of(model)
    group = scored_group([1, 2], [[3], [4]], [0.0, 0.0], finish=finish, status=signal)  # type: ignore[arg-type]

    def refuse() -> PrefixState:
        raise AssertionError("no state is needed")

    optimizer = SingleProcessOptimizer(model, OptimizerSpec())
    result = run_update(
        Policy(model, LAYOUT, gradient="exact"),
        [UpdateGroup(group, records(group, [[-1.0], [-1.0]]), refuse)],
        objective=ObjectiveSpec(),
        optimizer=optimizer,
        max_response_tokens=16,
    )
    assert (result.stepped, result.status, result.metrics) == (False, status, {})
    assert optimizer.steps_taken == 0
    assert all(torch.equal(before[name], value) for name, value in trainable_parameters(model).items())


def test_masked_responses_and_silent_groups_do_not_change_the_step(model: PeftModel) -> None:
    twin = tiny_policy_model()
    results = []
    for trained, with_others in ((model, False), (twin, True)):
        policy = Policy(trained, LAYOUT, gradient="exact")
        groups = update_groups(policy, BATCHES[:1])
        if with_others:
            entry = groups[0]
            longer = scored_group(
                BATCHES[0].prompt,
                [*BATCHES[0].responses, [1, 2, 3]],
                [*BATCHES[0].advantages, 2.5],
                sampler_logprobs=[*[list(rollout.logprobs) for rollout in entry.group.rollouts], [-1.0] * 3],
                finish=["stop", "stop", "stop", "length"],
            )
            old = [*[list(record.old_logprobs) for record in entry.logprobs], [-1.0] * 3]
            silent = scored_group([5, 6], [[7]], [0.0], status="no_signal", prompt_id="silent")
            groups = [
                UpdateGroup(silent, records(silent, [[-1.0]]), entry.open_state),
                UpdateGroup(longer, records(longer, old), entry.open_state),
            ]
        optimizer = SingleProcessOptimizer(trained, OptimizerSpec(learning_rate=1e-3))
        results.append(
            run_update(policy, groups, objective=ObjectiveSpec(), optimizer=optimizer, max_response_tokens=16)
        )
    assert results[0].metrics == results[1].metrics
    ours, theirs = trainable_parameters(model), trainable_parameters(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_kl_term_pulls_towards_the_reference_as_in_conventional_training(model: PeftModel) -> None:
    batch, objective = BATCHES[0], ObjectiveSpec(kl_coefficient=0.5, aggregation="sequence_mean", importance_cap=None)
    policy = Policy(model, LAYOUT, gradient="exact")
    state = policy.capture(batch.prompt, adapter=False)
    with torch.no_grad():
        reference = [
            policy.replay(state, response, temperature=1.0, adapter=False).logprobs_R for response in batch.responses
        ]
    state.release()
    entry = update_groups(policy, [batch])[0]
    old = [list(record.old_logprobs) for record in entry.logprobs]
    entry = UpdateGroup(entry.group, records(entry.group, old, [x.tolist() for x in reference]), entry.open_state)
    optimizer = SingleProcessOptimizer(model, OptimizerSpec(max_gradient_norm=None))
    twin = tiny_policy_model()
    total_kl = 0.0
    for response, advantage, reference_R, old_R in zip(batch.responses, batch.advantages, reference, old, strict=True):
        logprobs_R = full_logprobs(twin, batch.prompt, response)
        gap_R = reference_R - logprobs_R
        kl_R = gap_R.exp() - gap_R - 1
        total_kl += float(kl_R.detach().sum())
        ratio_R = (logprobs_R - torch.tensor(old_R)).exp()
        ((-ratio_R * advantage + 0.5 * kl_R).mean() / len(batch.responses)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e9))
    result = run_update(policy, [entry], objective=objective, optimizer=optimizer, max_response_tokens=16)
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert result.metrics["kl"] == pytest.approx(total_kl / 25, rel=1e-3)
    assert result.metrics["kl"] > 0


class OptimizerThatMustNotStep(SingleProcessOptimizer):
    def step(self) -> None:
        raise AssertionError("the optimizer was called")


def test_a_non_finite_loss_names_group_and_response_before_the_optimizer(model: PeftModel) -> None:
    policy = Policy(model, LAYOUT, gradient="exact")
    groups = update_groups(policy, BATCHES)
    record = groups[1].logprobs[1]
    broken = record.model_copy(update={"old_logprobs": (-1e30,) * len(record.old_logprobs)})
    groups[1] = UpdateGroup(groups[1].group, [groups[1].logprobs[0], broken], groups[1].open_state)
    negative = groups[1].group.model_copy(update={"advantages": (1.0, -1.0)})
    groups[1] = UpdateGroup(negative, groups[1].logprobs, groups[1].open_state)
    optimizer = OptimizerThatMustNotStep(model, OptimizerSpec())
    with pytest.raises(NumericError, match=r"group p1, response 1: loss is (inf|nan)"):
        run_update(policy, groups, objective=ObjectiveSpec(), optimizer=optimizer, max_response_tokens=16)
    assert policy.pool.used_bytes == 0
    assert all(parameter.grad is None for parameter in optimizer.parameters.values())


def test_a_non_finite_gradient_names_the_parameter_before_the_optimizer(model: PeftModel) -> None:
    policy = Policy(model, LAYOUT, gradient="exact")
    groups = update_groups(policy, BATCHES[:1])
    optimizer = OptimizerThatMustNotStep(model, OptimizerSpec())
    name = next(name for name in optimizer.parameters if "layers.2" in name)
    optimizer.parameters[name].register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NumericError, match=rf"gradient of {name} is not finite"):
        run_update(policy, groups, objective=ObjectiveSpec(), optimizer=optimizer, max_response_tokens=16)


def test_a_violated_witness_stops_the_update(model: PeftModel) -> None:
    policy = Policy(model, LAYOUT, gradient="exact")
    groups = update_groups(policy, BATCHES[:1])

    def open_and_tamper() -> PrefixState:
        state = groups[0].open_state()
        original = state.verify_witness

        def write_then_verify() -> None:
            next(iter(state.layers[1].blocks()))[1].add_(1.0)
            original()

        state.verify_witness = write_then_verify  # type: ignore[method-assign]
        return state

    tampered: list[UpdateGroup] = [UpdateGroup(groups[0].group, groups[0].logprobs, open_and_tamper)]
    with pytest.raises(IntegrityError, match=r"layer 1, page 0: was written during replay"):
        run_update(
            policy,
            tampered,
            objective=ObjectiveSpec(),
            optimizer=OptimizerThatMustNotStep(model, OptimizerSpec()),
            max_response_tokens=16,
        )
    assert policy.pool.used_bytes == 0


def test_inputs_that_disagree_are_refused_before_any_work(model: PeftModel) -> None:
    policy = Policy(model, LAYOUT, gradient="exact")
    group: ScoredGroup = scored_group([1, 2], [[3, 4], [5]], [1.0, -1.0])
    optimizer = OptimizerThatMustNotStep(model, OptimizerSpec())
    good = records(group, [[-1.0, -1.0], [-1.0]])

    def run(logprobs: list, objective: ObjectiveSpec | None = None) -> None:
        run_update(
            policy,
            [UpdateGroup(group, logprobs, lambda: pytest.fail("state was opened"))],
            objective=objective or ObjectiveSpec(),
            optimizer=optimizer,
            max_response_tokens=16,
        )

    with pytest.raises(DataRefused, match="group p0: 1 log-probability records for 2 responses"):
        run(good[:1])
    with pytest.raises(DataRefused, match=r"response 0: log-probabilities belong to p0\[1\]"):
        run(good[::-1])
    with pytest.raises(DataRefused, match="response 1: 2 old log-probabilities for 1 tokens"):
        run(records(group, [[-1.0, -1.0], [-1.0, -1.0]]))
    with pytest.raises(DataRefused, match="response 0: reference log-probabilities are missing"):
        run(good, ObjectiveSpec(kl_coefficient=0.1))
    with pytest.raises(SpecError, match="policy computes exact gradients, the objective asks for stopgrad"):
        run(good, ObjectiveSpec(gradient="stopgrad"))


def test_a_state_of_another_prompt_is_refused(model: PeftModel) -> None:
    policy = Policy(model, LAYOUT, gradient="exact")
    groups = update_groups(policy, BATCHES)
    mixed = [UpdateGroup(groups[0].group, groups[0].logprobs, groups[1].open_state)]
    with pytest.raises(DataRefused, match="group p0: the prompt state was captured from another prompt"):
        run_update(
            policy,
            mixed,
            objective=ObjectiveSpec(),
            optimizer=OptimizerThatMustNotStep(model, OptimizerSpec()),
            max_response_tokens=16,
        )
    assert policy.pool.used_bytes == 0

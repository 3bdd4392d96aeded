"""Checkpoints: resuming equals never having stopped, bit for bit; files are deterministic; damage is refused."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.errors import IntegrityError, NumericError
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ObjectiveSpec, OptimizerSpec
from longstraw_core.training.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from longstraw_core.training.lora import inject_adapter, load_adapter, trainable_parameters
from longstraw_core.training.optimizer import SingleProcessOptimizer
from longstraw_core.training.update import run_update
from tests.engine.oracle import tiny_base
from tests.training.test_update import BATCHES, update_groups

LORA = LoraSpec(rank=4)
SPEC = OptimizerSpec(learning_rate=1e-3, weight_decay=0.01, warmup_steps=2)


def train(model: PeftModel, optimizer: SingleProcessOptimizer, steps: int) -> None:
    policy = Policy(model, LayoutSpec(prompt_chunk_tokens=20, page_tokens=8), gradient="exact")
    for _ in range(steps):
        groups = update_groups(policy, BATCHES)
        run_update(policy, groups, objective=ObjectiveSpec(), optimizer=optimizer, max_response_tokens=16)


def trained(steps: int) -> tuple[PeftModel, SingleProcessOptimizer]:
    model = inject_adapter(tiny_base(), LORA, seed=3)
    optimizer = SingleProcessOptimizer(model, SPEC)
    train(model, optimizer, steps)
    return model, optimizer


def state_after(steps: int) -> TrainerState:
    return TrainerState(
        optimizer_steps=steps, transaction=steps, data_position=2 * steps, seed=3, metric_history=({"loss": 0.5},)
    )


def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted, optimizer = trained(2)
    save_checkpoint(tmp_path / "two", uninterrupted, optimizer, state_after(2))
    torch.manual_seed(77)
    save_checkpoint(tmp_path / "again", uninterrupted, optimizer, state_after(2))
    random_numbers = torch.rand(3)
    train(uninterrupted, optimizer, 2)

    resumed = load_adapter(tiny_base(), tmp_path / "again" / "adapter", expected=LORA)
    resumed_optimizer = SingleProcessOptimizer(resumed, SPEC)
    torch.manual_seed(1)
    state = load_checkpoint(tmp_path / "again", resumed, resumed_optimizer)
    assert state == state_after(2)
    assert torch.equal(torch.rand(3), random_numbers)
    train(resumed, resumed_optimizer, 2)

    ours, theirs = trainable_parameters(resumed), trainable_parameters(uninterrupted)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    moments, expected = resumed_optimizer.state_tensors(), optimizer.state_tensors()
    assert all(torch.equal(moments[name], expected[name]) for name in expected)
    save_checkpoint(tmp_path / "a", resumed, resumed_optimizer, state_after(4))
    save_checkpoint(tmp_path / "b", uninterrupted, optimizer, state_after(4))
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "optimizer.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_checkpoint_before_the_first_step_can_be_resumed(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    save_checkpoint(tmp_path, model, optimizer, state_after(0))
    other = inject_adapter(tiny_base(), LORA, seed=9)
    other_optimizer = SingleProcessOptimizer(other, SPEC)
    assert load_checkpoint(tmp_path, other, other_optimizer).optimizer_steps == 0
    assert other_optimizer.learning_rate == optimizer.learning_rate
    ours, theirs = trainable_parameters(other), trainable_parameters(model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, model, optimizer, state_after(1))
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "random_state.safetensors",
        "trainer_state.json",
    ]


@pytest.mark.parametrize(
    "change",
    [
        "missing",
        "misshapen",
        "unexpected",
        "no state",
        "not canonical",
        "cut",
        "not finite",
        "negative squares",
        "random state",
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, change: str) -> None:
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, model, optimizer, state_after(1))
    path = tmp_path / "optimizer.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    if change == "missing":
        del tensors[name]
    elif change == "misshapen":
        tensors[name] = tensors[name][:1].contiguous()
    elif change == "unexpected":
        tensors["stranger"] = torch.zeros(1)
    elif change == "not finite":
        tensors[name].view(-1)[0] = float("nan")
    elif change == "negative squares":
        tensors[name.replace("exp_avg.", "exp_avg_sq.")].view(-1)[0] = -1e-6
    elif change == "random state":
        save_file({"cpu": torch.zeros(5, dtype=torch.uint8)}, tmp_path / "random_state.safetensors")
    save_file(tensors, path)
    state_path = tmp_path / "trainer_state.json"
    if change == "no state":
        state_path.unlink()
    elif change == "not canonical":
        state_path.write_bytes(b" " + state_path.read_bytes())
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(IntegrityError):
        load_checkpoint(tmp_path, model, SingleProcessOptimizer(model, SPEC))


def test_a_trainer_state_that_disagrees_with_the_optimizer_cannot_be_saved(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    with pytest.raises(IntegrityError, match="says 2 optimizer steps, the optimizer took 1"):
        save_checkpoint(tmp_path, model, optimizer, state_after(2))


@pytest.mark.parametrize("kind", ["adapter", "moment"])
def test_a_step_that_left_values_that_are_not_finite_is_not_saved(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(1)
    tensors = trainable_parameters(model) if kind == "adapter" else optimizer.state_tensors()
    name, tensor = next(iter(tensors.items()))
    with torch.no_grad():
        tensor.view(-1)[0] = float("inf")
    with pytest.raises(NumericError, match=f"{name} is not finite after step 1: no checkpoint was written"):
        save_checkpoint(tmp_path / "checkpoint", model, optimizer, state_after(1))
    assert not (tmp_path / "checkpoint").exists()

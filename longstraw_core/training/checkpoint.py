"""A checkpoint directory: adapter, optimizer state, random state, trainer state. Safetensors and JSON, no pickle.

adapter/adapter_config.json, adapter/adapter_model.safetensors   PEFT's format
optimizer.safetensors      exp_avg.<name>, exp_avg_sq.<name>
random_state.safetensors   torch generator states: `cpu`, and `cuda.N` where a GPU is used; `rank.N.…` of other ranks
trainer_state.json         TrainerState, canonical JSON, written last
"""

from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.errors import IntegrityError, NumericError
from longstraw_core.spec.model import Count, FiniteFloat, StrictModel
from longstraw_core.training.expert_tensors import held_tensors, whole_tensors
from longstraw_core.training.lora import expert_count, load_adapter_tensors, save_adapter, trainable_parameters
from longstraw_core.training.optimizer import AdapterOptimizer
from longstraw_core.training.process_groups import Ranks

ADAPTER_DIRECTORY = "adapter"
OPTIMIZER_NAME = "optimizer.safetensors"
RANDOM_STATE_NAME = "random_state.safetensors"
TRAINER_STATE_NAME = "trainer_state.json"


class TrainerState(StrictModel):
    """Where training stands."""

    kind: Literal["longstraw.trainer-state/1"] = "longstraw.trainer-state/1"
    optimizer_steps: Count
    transaction: Count
    """Transactions completed."""
    data_position: Count
    """Prompts consumed from the shuffled data."""
    seed: Count
    metric_history: tuple[dict[str, FiniteFloat], ...] = ()
    """One entry per transaction."""


def save_checkpoint(
    directory: Path, model: PeftModel, optimizer: AdapterOptimizer, state: TrainerState, ranks: Ranks | None = None
) -> None:
    """Write a checkpoint into an empty or new directory; equal state gives equal bytes, on any number of ranks.

    All ranks call this; rank 0 writes.

    Raises:
        IntegrityError: `state.optimizer_steps` is not what the optimizer did.
        NumericError: the step left a value that is not finite; every rank raises, nothing is written.
    """
    if state.optimizer_steps != optimizer.steps_taken:
        raise IntegrityError(
            f"trainer state says {state.optimizer_steps} optimizer steps, the optimizer took {optimizer.steps_taken}"
        )
    ranks = ranks or Ranks.alone()
    experts, group = expert_count(model), ranks.experts if optimizer.own else RankGroup.alone()
    adapter = whole_tensors(dict(trainable_parameters(model)), experts, group)
    moments = whole_tensors(optimizer.state_tensors(), experts, group)
    for name, tensor in sorted((adapter | moments).items()):
        if not bool(torch.isfinite(tensor).all()):
            raise NumericError(
                f"{name} is not finite after step {state.optimizer_steps}: no checkpoint was written; "
                "lower optimizer.learning_rate"
            )
    random_states = _states_of_ranks(ranks)
    if ranks.rank != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_adapter(model, directory / ADAPTER_DIRECTORY, tensors=adapter)
    save_file(moments, directory / OPTIMIZER_NAME)
    save_file(random_states, directory / RANDOM_STATE_NAME)
    (directory / TRAINER_STATE_NAME).write_bytes(canonical_json(state))


def load_checkpoint(
    directory: Path, model: PeftModel, optimizer: AdapterOptimizer, ranks: Ranks | None = None
) -> TrainerState:
    """Restore adapter weights, optimizer and random state exactly, and return the trainer state.

    Raises:
        IntegrityError: a file is missing, damaged or belongs to another model.
    """
    path = directory / TRAINER_STATE_NAME
    if not path.is_file():
        raise IntegrityError(f"{path}: missing; the checkpoint was not completed")
    try:
        state = TrainerState.model_validate(parse_canonical_json(path.read_bytes(), name=str(path)))
    except ValidationError as error:
        raise IntegrityError(f"{path}: not a trainer state: {error.errors()[0]['msg']}") from error
    ranks = ranks or Ranks.alone()
    group = ranks.experts if optimizer.own else RankGroup.alone()
    load_adapter_tensors(model, directory / ADAPTER_DIRECTORY, experts=group)
    moments = held_tensors(_load(directory / OPTIMIZER_NAME), expert_count(model), group)
    optimizer.load_state_tensors(moments, state.optimizer_steps)
    stored = _load(directory / RANDOM_STATE_NAME)
    own = {name.removeprefix(f"rank.{ranks.rank}."): state for name, state in stored.items()}
    _restore_random_states(own if f"rank.{ranks.rank}.cpu" in stored else stored, directory / RANDOM_STATE_NAME)
    return state


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}: not a readable safetensors file: {error}") from error


def _states_of_ranks(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Random states of all ranks: rank 0's by their own names, others' as `rank.N.<name>`."""
    states: dict[str, torch.Tensor] = {}
    for rank, content in enumerate(ranks.gather(save(_random_states()))):
        prefix = f"rank.{rank}." if rank else ""
        states |= {f"{prefix}{name}": state for name, state in load(content).items()}
    return states


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_random_states(states: dict[str, torch.Tensor], path: Path) -> None:
    if "cpu" not in states:
        raise IntegrityError(f"{path}: random state of the CPU is missing")
    try:
        torch.set_rng_state(states["cpu"])
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"cuda.{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda.{index}"], index)
    except (RuntimeError, TypeError) as error:
        raise IntegrityError(f"{path}: not a random state of torch: {error}") from error

"""A checkpoint directory: adapter, optimizer state, random state, trainer state. Safetensors and JSON, no pickle.

adapter/adapter_config.json, adapter/adapter_model.safetensors   PEFT's format
optimizer.safetensors      exp_avg.<name>, exp_avg_sq.<name>
random_state.safetensors   torch generator states: `cpu`, and `cuda.N` where a GPU is used
trainer_state.json         TrainerState, canonical JSON, written last
"""

from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.model import Count, FiniteFloat, StrictModel
from longstraw_core.training.lora import load_adapter_tensors, save_adapter
from longstraw_core.training.optimizer import AdapterOptimizer

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


def save_checkpoint(directory: Path, model: PeftModel, optimizer: AdapterOptimizer, state: TrainerState) -> None:
    """Write a checkpoint into an empty or new directory; equal state gives equal bytes.

    Raises:
        IntegrityError: `state.optimizer_steps` is not what the optimizer did.
    """
    if state.optimizer_steps != optimizer.steps_taken:
        raise IntegrityError(
            f"trainer state says {state.optimizer_steps} optimizer steps, the optimizer took {optimizer.steps_taken}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    save_adapter(model, directory / ADAPTER_DIRECTORY)
    moments = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.state_tensors().items()}
    save_file(moments, directory / OPTIMIZER_NAME)
    save_file(_random_states(), directory / RANDOM_STATE_NAME)
    (directory / TRAINER_STATE_NAME).write_bytes(canonical_json(state))


def load_checkpoint(directory: Path, model: PeftModel, optimizer: AdapterOptimizer) -> TrainerState:
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
    load_adapter_tensors(model, directory / ADAPTER_DIRECTORY)
    optimizer.load_state_tensors(_load(directory / OPTIMIZER_NAME), state.optimizer_steps)
    _restore_random_states(_load(directory / RANDOM_STATE_NAME), directory / RANDOM_STATE_NAME)
    return state


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}: not a readable safetensors file: {error}") from error


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_random_states(states: dict[str, torch.Tensor], path: Path) -> None:
    if "cpu" not in states:
        raise IntegrityError(f"{path}: random state of the CPU is missing")
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)

"""Updates of small models on ranks: five in one go, or stopped, killed and continued from the checkpoint."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.transaction import LayoutSpec, ObjectiveSpec, OptimizerSpec
from longstraw_core.training.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from longstraw_core.training.lora import trainable_parameters
from longstraw_core.training.optimizer_choice import make_optimizer
from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.session import TrainingSession
from longstraw_core.training.update import run_update
from tests.engine.oracle import random_batch, tiny_policy_model
from tests.training.test_update import update_groups

LAYOUT = LayoutSpec(prompt_chunk_tokens=20, page_tokens=8)
# A prompt of 41 tokens captures 40: the boundary between two ranks' tokens falls on a chunk's and a response's label.
BATCHES = [random_batch(50, [9, 1, 12], seed=3), random_batch(41, [5, 3], seed=4)]
SPEC = OptimizerSpec(learning_rate=1e-3, weight_decay=0.01, warmup_steps=3)
STEPS = 5


def updates(model: Any, ranks: Ranks, directory: Path | None, first: int, last: int) -> dict[str, Any]:
    """Updates [first, last), from the checkpoint in `directory` when first is not 0; saves into it when not done."""
    optimizer = make_optimizer(model, SPEC, ranks)
    if first and directory is not None:
        state = load_checkpoint(directory, model, optimizer, ranks)
        assert state.optimizer_steps == first
    policy = Policy(model, LAYOUT, gradient="exact", context=ranks.context, experts=ranks.experts)
    norms, sessions = [], []
    for _ in range(first, last):
        session = TrainingSession(ranks)
        with session.phase("load"):
            session.watch(optimizer)
        result = run_update(
            policy,
            update_groups(policy, BATCHES),
            objective=ObjectiveSpec(),
            optimizer=optimizer,
            max_response_tokens=16,
            clock=session,
            opening="capture",
            before_step=lambda session=session: session.witness_gradients(optimizer, 7),
        )
        assert result.stepped
        norms.append(result.metrics["grad_norm"])
        sessions.append(session.report(optimizer).model_dump(mode="json"))
    if directory is not None and last < STEPS:
        state = TrainerState(optimizer_steps=last, transaction=last, data_position=0, seed=0)
        save_checkpoint(directory, model, optimizer, state, ranks)
    adapter = {name: value.detach() for name, value in trainable_parameters(model).items()}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in adapter.values())).hexdigest()
    return {
        "norms": norms,
        "digest": digest,
        "adapter": {name: value.flatten().tolist() for name, value in adapter.items()},
        "sessions": sessions,
        "random": torch.rand(1).item(),
    }


def five_updates(request: bytes, ranks: Ranks) -> bytes:
    """Uninterrupted."""
    model = tiny_policy_model()
    torch.manual_seed(ranks.rank)
    return json.dumps(updates(model, ranks, None, 0, STEPS)).encode()


def stop_after_two(request: bytes, ranks: Ranks) -> bytes:
    """Two updates and a checkpoint; then the last rank is killed."""
    model = tiny_policy_model()
    torch.manual_seed(ranks.rank)
    updates(model, ranks, Path(request.decode()), 0, 2)
    ranks.gather(b"")
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(b"")
    return b""


def continue_to_five(request: bytes, ranks: Ranks) -> bytes:
    """The remaining updates from the checkpoint, by processes that know nothing else."""
    return json.dumps(updates(tiny_policy_model(), ranks, Path(request.decode()), 2, STEPS)).encode()

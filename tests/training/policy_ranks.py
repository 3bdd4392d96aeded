"""Updates of small models on ranks: five in one go, or stopped, killed and continued from the checkpoint.

What a function is asked for is the directory that ranks and test share: `model` and `adapter` are the small GLM's, and
checkpoints lie in `<family>-<name>`.
"""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange.rank_group import ALONE
from longstraw_core.spec.model import StrictModel
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ModelSpec, ObjectiveSpec, OptimizerSpec
from longstraw_core.training.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from longstraw_core.training.expert_tensors import whole_tensors
from longstraw_core.training.lora import expert_count, inject_adapter, save_adapter, trainable_parameters
from longstraw_core.training.model import load_policy_model
from longstraw_core.training.optimizer_choice import make_optimizer
from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.session import TrainingSession
from longstraw_core.training.update import run_update
from tests.engine import glm_oracle
from tests.engine.oracle import random_batch, tiny_policy_model
from tests.training.test_update import update_groups

LAYOUT = LayoutSpec(prompt_chunk_tokens=20, page_tokens=8)
# A prompt of 41 tokens captures 40: the boundary between two ranks' tokens falls on a chunk's and a response's label.
BATCHES = [random_batch(50, [9, 1, 12], seed=3), random_batch(41, [5, 3], seed=4)]
SPEC = OptimizerSpec(learning_rate=1e-3, weight_decay=0.01, warmup_steps=3)
STEPS, STOPPED_AFTER = 5, 2
FAMILIES = ("hybrid", "glm")


class Span(StrictModel):
    """Which updates, from which checkpoint and into which; names are files of the shared directory."""

    first: int = 0
    last: int = STEPS
    load: str | None = None
    save: str | None = None


def write_glm(folder: Path) -> None:
    """A snapshot of the small GLM, and an adapter on everything that can be trained, with non-zero factors."""
    glm_oracle.tiny_base().save_pretrained(folder / "model")
    adapted = inject_adapter(glm_oracle.tiny_base(), LoraSpec(rank=2, targets="all"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(adapted).items():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(adapted, folder / "adapter")


def load(family: str, folder: Path, ranks: Ranks) -> Any:
    """The model of a family; of GLM's experts and their adapters each rank has only its own."""
    if family == "hybrid":
        return tiny_policy_model()
    spec = ModelSpec(snapshot="model", family="glm_moe_dsa", dtype="float32")
    return load_policy_model(folder / "model", folder / "adapter", spec, experts=ranks.experts)


def updates(family: str, folder: Path, ranks: Ranks, span: Span) -> dict[str, Any]:
    """Run the updates of a span; tensors in the report are whole, and on the ranks equal or not as they may be."""
    model = load(family, folder, ranks)
    optimizer = make_optimizer(model, SPEC, ranks)
    torch.manual_seed(ranks.rank)
    if span.load is not None:
        state = load_checkpoint(folder / span.load, model, optimizer, ranks)
        assert state.optimizer_steps == span.first
    experts = ranks.experts if family == "glm" else ALONE
    policy = Policy(model, LAYOUT, gradient="exact", context=ranks.context, experts=experts)
    norms, sessions, digests = [], [], []
    for _ in range(span.first, span.last):
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
        digests.append(digest(whole_adapter(model, ranks)))
    if span.save is not None:
        state = TrainerState(optimizer_steps=span.last, transaction=span.last, data_position=0, seed=0)
        save_checkpoint(folder / span.save, model, optimizer, state, ranks)
    return {
        "norms": norms,
        "digests": digests,
        "held": {name: list(value.shape) for name, value in trainable_parameters(model).items()},
        "adapter": {name: value.flatten().tolist() for name, value in whole_adapter(model, ranks).items()},
        "sessions": sessions,
        "random": torch.rand(1).item(),
    }


def whole_adapter(model: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """All tensors of the adapter, experts of this rank's expert-parallel group joined."""
    return whole_tensors(dict(trainable_parameters(model)), expert_count(model), ranks.experts)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in tensors.values())).hexdigest()


def five_updates(request: bytes, ranks: Ranks) -> bytes:
    """Uninterrupted, for each family."""
    folder = Path(request.decode())
    span = Span(save=f"five-on-{ranks.size}-and-{ranks.expert_size}")
    return json.dumps({family: updates(family, folder, ranks, _of(family, span)) for family in FAMILIES}).encode()


def stop_after_two(request: bytes, ranks: Ranks) -> bytes:
    """Two updates and a checkpoint for each family; then the last rank is killed."""
    folder = Path(request.decode())
    for family in FAMILIES:
        updates(family, folder, ranks, _of(family, Span(last=STOPPED_AFTER, save="stopped")))
    ranks.gather(b"")
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(b"")
    return b""


def continue_to_five(request: bytes, ranks: Ranks) -> bytes:
    """The remaining updates from the checkpoint, by processes that know nothing else."""
    folder = Path(request.decode())
    span = Span(first=STOPPED_AFTER, load="stopped", save="continued")
    return json.dumps({family: updates(family, folder, ranks, _of(family, span)) for family in FAMILIES}).encode()


def five_elsewhere(request: bytes, ranks: Ranks) -> bytes:
    """GLM on another layout: five updates, and the checkpoint that four ranks left, loaded and saved again."""
    folder = Path(request.decode())
    again = Span(first=STEPS, load="five-on-4-and-4", save=f"again-on-{ranks.size}-and-{ranks.expert_size}")
    spans = {"five": Span(), "again": again}
    return json.dumps({name: updates("glm", folder, ranks, _of("glm", span)) for name, span in spans.items()}).encode()


def _of(family: str, span: Span) -> Span:
    """The same span with the family's own checkpoints."""
    names = {key: f"{family}-{name}" for key in ("load", "save") if (name := getattr(span, key)) is not None}
    return span.model_copy(update=names)

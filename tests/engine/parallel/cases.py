"""What the tests of parallel ranks compute on every rank: one gradient per case, summed, with what it took.

A case runs on one context group; its results lie in one safetensors file (gradients summed over the group, and
log-probabilities) with the facts of every rank beside it as JSON.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed
from peft import PeftModel
from safetensors.torch import save_file

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange import volume
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.mixers.exchange.volume import Travels
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec
from tests.engine.oracle import Batch, gradients, random_batch, surrogate


@dataclass(frozen=True)
class Case:
    """One gradient."""

    name: str
    prompt: int
    responses: tuple[int, ...]
    chunk: int
    mode: GradientMode
    ranks: int
    travels: Travels | None = None
    """What travels in attention; None leaves the choice to the volume formula."""
    page: int = 16
    checkpoint_layers: bool = False

    @property
    def batch(self) -> Batch:
        """The same batch on every rank and in the reference."""
        return random_batch(self.prompt, self.responses)


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    resident_bytes: int
    planned_bytes: int
    sent: list[tuple[str, int, str, int]]
    """(phase, layer, purpose, bytes)."""


@contextmanager
def what_travels(travels: Travels | None) -> Iterator[None]:
    """Take the choice from the volume formula."""
    if travels is None:
        yield
        return
    with patch.object(volume, "cheaper", lambda *_, **__: travels):
        yield


def engine_gradients(
    model: PeftModel, case: Case, context: RankGroup, experts: RankGroup | None = None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], Measured]:
    """Local gradients of this rank, log-probabilities of all responses, and what was measured."""
    policy = Policy(
        model,
        LayoutSpec(prompt_chunk_tokens=case.chunk, page_tokens=case.page, checkpoint_layers=case.checkpoint_layers),
        gradient=case.mode,
        context=context,
        **({} if experts is None else {"experts": experts}),
    )
    model.zero_grad(set_to_none=True)
    batch = case.batch
    with what_travels(case.travels):
        state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
        resident = policy.pool.used_bytes
        logprobs = []
        for response, advantage in zip(batch.responses, batch.advantages, strict=True):
            replayed = policy.replay(state, response, temperature=1.0)
            surrogate(replayed.logprobs_R, advantage, len(batch.responses)).backward()
            state.verify_witness()
            logprobs.append(replayed.logprobs_R.detach())
        if case.mode == "exact":
            policy.reverse_sweep(state)
    state.release()
    assert policy.pool.used_bytes == 0
    sent = [(*key, count) for key, count in policy.traffic.take().items()]
    return gradients(model), logprobs, Measured(resident, policy.state_bytes(case.prompt).captured, sent)


def summed(local: dict[str, torch.Tensor], context: RankGroup) -> dict[str, torch.Tensor]:
    """Sum over the group of every parameter's local gradient."""
    for gradient in local.values():
        torch.distributed.all_reduce(gradient, group=context.process_group)
    return local


def run_cases(rank: int, model: PeftModel, cases: Sequence[Case], folder: str, mutant: str | None = None) -> None:
    """Run all cases on as many equal groups as fit into the world; group g takes every case whose turn is g."""
    world = torch.distributed.get_world_size()
    for ranks in sorted({case.ranks for case in cases}):
        groups = [torch.distributed.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        mine = rank // ranks
        context = RankGroup.of(groups[mine])
        for case in [case for case in cases if case.ranks == ranks][mine :: len(groups)]:
            run_case(model, case, context, Path(folder))
    del mutant


def run_case(model: PeftModel, case: Case, context: RankGroup, folder: Path) -> None:
    """Run one case and write its files."""
    with ExitStack():
        local, logprobs, measured = engine_gradients(model, case, context)
        total = summed(local, context)
    (folder / f"{case.name}.rank-{context.rank}.json").write_text(json.dumps(asdict(measured)))
    if context.rank == 0:
        named = {f"gradient.{name}": value for name, value in total.items()}
        named |= {f"logprobs.{index:03d}": value for index, value in enumerate(logprobs)}
        save_file({name: value.contiguous() for name, value in named.items()}, folder / f"{case.name}.safetensors")

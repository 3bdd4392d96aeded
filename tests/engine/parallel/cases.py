"""What the tests of parallel ranks compute on every rank: one gradient per case, summed, with what it took.

A case runs on one context group; its results lie in one safetensors file (gradients summed over the group, and
log-probabilities) with the facts of every rank beside it as JSON.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import patch

import torch
import torch.distributed
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange import volume
from longstraw_core.mixers.exchange.expert_shard import expert_parameters
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.exchange.volume import Travels
from longstraw_core.resident.files import PrefixManifest, write_manifest
from longstraw_core.resident.identity import PrefixIdentity, prompt_token_digest
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec, SelectionRecord
from tests.engine.glm_oracle import adapter_off_on_prompt, engine_pinned_to, recorded_choices
from tests.engine.oracle import Batch, full_logprobs, gradients, random_batch, surrogate


@dataclass(frozen=True)
class Case:
    """One gradient."""

    name: str
    prompt: int
    responses: tuple[int, ...]
    chunk: int
    mode: GradientMode
    ranks: int
    """Context ranks."""
    travels: Travels | None = None
    """What travels in attention; None leaves the choice to the volume formula."""
    page: int = 16
    checkpoint_layers: bool = False
    experts: int = 1
    """Expert ranks; with more of them than context ranks, several context groups compute the same."""
    record: SelectionRecord = "cut"
    pinned: bool = False
    """Whether experts and tokens are chosen as in the full sequence."""
    captured_by: int = 0
    """Ranks that captured the prompt and stored its state, which this case restores; 0 captures it here."""

    @property
    def batch(self) -> Batch:
        """The same batch on every rank and in the reference."""
        return random_batch(self.prompt, self.responses)


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    resident_bytes: int
    planned_bytes: int
    sent: list[list[str | int]]
    """[phase, layer, purpose, bytes]."""


@contextlib.contextmanager
def what_travels(travels: Travels | None) -> Iterator[None]:
    """Take the choice from the volume formula."""
    if travels is None:
        yield
        return
    with patch.object(volume, "cheaper", lambda *_, **__: travels):
        yield


def policy_of(model: PeftModel, case: Case, context: RankGroup, experts: RankGroup = ALONE) -> Policy:
    """The engine in the layout of a case."""
    layout = LayoutSpec(
        prompt_chunk_tokens=case.chunk,
        page_tokens=case.page,
        checkpoint_layers=case.checkpoint_layers,
        selection_record=case.record,
    )
    return Policy(model, layout, gradient=case.mode, context=context, experts=experts)


def identity_of(case: Case) -> PrefixIdentity:
    """What the case's prompt is stored under."""
    return PrefixIdentity(
        snapshot_digest=sha256_digest(b"model"),
        adapter_digest=sha256_digest(b"adapter"),
        prompt_digest=prompt_token_digest(case.batch.prompt),
        gradient=case.mode,
        reference=False,
    )


def store_prompt(model: PeftModel, case: Case, context: RankGroup, directory: Path) -> None:
    """Capture the prompt on these ranks and store its state: every rank its shards, the first one the manifest."""
    state = policy_of(model, case, context).capture(case.batch.prompt, adapter=True)
    shards = [state.save_shards(directory)] * context.size
    if context.size > 1:
        torch.distributed.all_gather_object(shards, shards[0], group=context.process_group)
    if context.rank == 0:
        manifest = PrefixManifest(
            identity=identity_of(case),
            ranks=context.size,
            prompt_token_ids=tuple(case.batch.prompt),
            chunk_starts=tuple(state.chunk_starts),
            shards=tuple(itertools.chain.from_iterable(shards)),
        )
        write_manifest(directory, manifest)
    state.release()


def engine_gradients(
    model: PeftModel, case: Case, context: RankGroup, experts: RankGroup = ALONE, *, stored: Path | None = None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], Measured]:
    """Local gradients of this rank, log-probabilities of all responses, and what was measured."""
    policy = policy_of(model, case, context, experts)
    batch = case.batch
    pins = pinned_choices(model, case) if case.pinned else [contextlib.nullcontext] * len(batch.responses)
    model.zero_grad(set_to_none=True)
    with what_travels(case.travels):
        with pins[0]():
            if stored is None:
                state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
            else:
                state = policy.load_state(stored, identity_of(case))
        resident = policy.pool.used_bytes
        logprobs = []
        for response, advantage, pin in zip(batch.responses, batch.advantages, pins, strict=True):
            with pin():
                replayed = policy.replay(state, response, temperature=1.0)
            surrogate(replayed.logprobs_R, advantage, len(batch.responses)).backward()
            state.verify_witness()
            logprobs.append(replayed.logprobs_R.detach())
        if case.mode == "exact":
            policy.reverse_sweep(state)
    state.release()
    assert policy.pool.used_bytes == 0
    sent: list[list[str | int]] = [[*key, count] for key, count in policy.traffic.take().items()]
    return gradients(model), logprobs, Measured(resident, policy.state_bytes(case.prompt).captured, sent)


def pinned_choices(model: PeftModel, case: Case) -> list[Callable[[], contextlib.AbstractContextManager[None]]]:
    """For every response, a context in which the engine chooses as transformers does in its full sequence."""
    pins = []
    adapter_off = case.mode == "response_adapter"
    with adapter_off_on_prompt(model, case.prompt) if adapter_off else contextlib.nullcontext(), torch.no_grad():
        for response in case.batch.responses:
            with recorded_choices(model) as choices:
                full_logprobs(model, case.batch.prompt, response)
            pins.append(partial(engine_pinned_to, choices))
    return pins


def summed(local: dict[str, torch.Tensor], context: RankGroup, experts: RankGroup) -> dict[str, torch.Tensor]:
    """The true gradients: sums over the context group, and of experts over all ranks that hold parts of them.

    With more expert than context ranks every context group computed the same: experts saw each token that often.
    """
    wide = experts if experts.size > context.size else context
    own = expert_parameters(local)
    for name, gradient in local.items():
        group = wide if name in own else context
        if group.size > 1:
            torch.distributed.all_reduce(gradient, group=group.process_group)
        if name in own:
            gradient /= wide.size // context.size
    return local


def groups_of(world: int, size: int) -> list[torch.distributed.ProcessGroup]:
    """All groups of consecutive ranks; every rank makes all of them, and takes part in one."""
    made = [torch.distributed.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return cast("list[torch.distributed.ProcessGroup]", made)


def run_cases(rank: int, model: PeftModel, cases: Sequence[Case], folder: str) -> None:
    """Run all cases; where the world holds several groups that are independent, each takes its share of the cases."""
    world = torch.distributed.get_world_size()
    groups = {size: groups_of(world, size) for size in (1, 2, 4) if size <= world}
    for case in cases:
        if rank < case.captured_by:
            group = RankGroup.of(groups[case.captured_by][0])
            store_prompt(model, case, group, Path(folder) / f"{case.name}.state")
    torch.distributed.barrier()
    for sizes in sorted({(case.ranks, case.experts) for case in cases}):
        context, experts = (RankGroup.of(groups[size][rank // size]) for size in sizes)
        chosen = [case for case in cases if (case.ranks, case.experts) == sizes]
        for case in chosen[rank // max(sizes) :: world // max(sizes)]:
            run_case(model, case, context, experts, Path(folder), writes=rank % max(sizes) == 0)


def run_case(
    model: PeftModel, case: Case, context: RankGroup, experts: RankGroup, folder: Path, *, writes: bool
) -> None:
    """Run one case and write its files."""
    try:
        stored = folder / f"{case.name}.state" if case.captured_by else None
        local, logprobs, measured = engine_gradients(model, case, context, experts, stored=stored)
    except Exception as error:
        raise RuntimeError(f"case {case.name}") from error
    total = summed(local, context, experts)
    (folder / f"{case.name}.rank-{context.rank}.json").write_text(json.dumps(asdict(measured)))
    if writes:
        named = {f"gradient.{name}": value for name, value in total.items()}
        named |= {f"logprobs.{index:03d}": value for index, value in enumerate(logprobs)}
        save_file({name: value.contiguous() for name, value in named.items()}, folder / f"{case.name}.safetensors")


def read_result(folder: Path, case: Case) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients and log-probabilities that a case wrote."""
    stored = load_file(folder / f"{case.name}.safetensors")
    gradient = {name.removeprefix("gradient."): value for name, value in stored.items() if name.startswith("gradient.")}
    return gradient, [stored[name] for name in sorted(stored) if name.startswith("logprobs.")]


def read_measured(folder: Path, case: Case, rank: int) -> Measured:
    """What a rank of the case's context group measured."""
    return Measured(**json.loads((folder / f"{case.name}.rank-{rank}.json").read_text()))

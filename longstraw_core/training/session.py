"""The session of one stage on one rank: its phases in their only order, and what it reports when it is done."""

import contextlib
import hashlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from longstraw_core.spec.rank_sessions import (
    PROJECTION_SIZE,
    GradientWitness,
    Placement,
    RankSession,
    StateDigests,
)
from longstraw_core.training.optimizer import AdapterOptimizer
from longstraw_core.training.phases import PhaseClock, peak_memory_bytes
from longstraw_core.training.process_groups import Ranks

START = "start"
FOLLOWS: Mapping[str, frozenset[str]] = {
    START: frozenset({"load"}),
    "load": frozenset({"restore", "capture", "checkpoint", "release"}),
    "restore": frozenset({"restore", "capture", "old_logprobs", "replay", "release"}),
    "capture": frozenset({"restore", "capture", "old_logprobs", "replay", "release"}),
    "old_logprobs": frozenset({"old_logprobs", "restore", "capture", "replay", "release"}),
    "replay": frozenset({"replay", "reverse_sweep", "restore", "capture", "finalise"}),
    "reverse_sweep": frozenset({"reverse_sweep", "restore", "capture", "finalise"}),
    "finalise": frozenset({"optimizer_step", "release"}),
    "optimizer_step": frozenset({"checkpoint"}),
    "checkpoint": frozenset({"release"}),
    "release": frozenset(),
}
"""Which phases may follow each. A group without a signal is not replayed: then `load` is followed by `checkpoint`."""


class PhaseOrderError(RuntimeError):
    """A phase was entered out of order: a programming error, caught before it changes anything."""


class TrainingSession(PhaseClock):
    """A phase clock that refuses phases out of order and tells the launcher where this rank is.

    Args:
        ranks: this process among the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.device)
        self.ranks = ranks
        self.sequence: list[str] = []
        self._now = START
        self._before: StateDigests | None = None
        self._witnesses: tuple[GradientWitness, ...] = ()
        self._expert_witnesses: tuple[GradientWitness, ...] = ()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase, time it, and leave it.

        Raises:
            PhaseOrderError: it may not follow the phase before.
        """
        if name not in FOLLOWS:
            raise PhaseOrderError(f"unknown phase {name!r}; phases are {', '.join(sorted(FOLLOWS))}")
        if name not in FOLLOWS[self._now]:
            raise PhaseOrderError(
                f"phase {name} cannot follow {self._now}; {' or '.join(sorted(FOLLOWS[self._now])) or 'nothing'} can"
            )
        if name != self._now:
            self.sequence.append(name)
        self._now = name
        self.ranks.enter(name)
        with super().phase(name):
            yield

    def watch(self, optimizer: AdapterOptimizer) -> None:
        """Note the state that the session starts from."""
        self._before = state_digests(optimizer)

    def witness_gradients(self, optimizer: AdapterOptimizer, seed: int) -> None:
        """Note a bounded trace of the finalised gradients."""
        shared = [name for name in optimizer.parameters if name not in optimizer.own]
        self._witnesses = gradient_witnesses(shared, optimizer.gradient, seed=seed)
        self._expert_witnesses = gradient_witnesses(sorted(optimizer.own), optimizer.gradient, seed=seed)

    def report(self, optimizer: AdapterOptimizer) -> RankSession:
        """Return this rank's account, with the state as it is now."""
        if self._before is None:
            raise PhaseOrderError("watch() was not called before the session changed anything")
        return RankSession(
            rank=self.ranks.rank,
            planned=self.ranks.planned,
            observed=observed_placement(self.ranks),
            phases=tuple(self.sequence),
            before=self._before,
            after=state_digests(optimizer),
            witnesses=self._witnesses,
            expert_witnesses=self._expert_witnesses,
            peak_memory_bytes=peak_memory_bytes(self.ranks.device),
        )


def observed_placement(ranks: Ranks) -> Placement:
    """Where this process really is; the accelerator's identity is its UUID."""
    accelerator = None
    if ranks.device.type == "cuda":
        accelerator = str(torch.cuda.get_device_properties(ranks.device).uuid)
    return Placement(host=socket.gethostname(), rank=ranks.rank, device=str(ranks.device), accelerator=accelerator)


def state_digests(optimizer: AdapterOptimizer) -> StateDigests:
    """Digest what a rank trains: names, shapes and bytes, sorted by name."""
    own = optimizer.own
    moments = optimizer.state_tensors()

    def is_own(key: str) -> bool:
        return key.split(".", 1)[1] in own

    parameters = {f"parameter.{name}": value for name, value in optimizer.parameters.items()}
    return StateDigests(
        adapter=tensor_digest({key: value for key, value in parameters.items() if not is_own(key)}),
        optimizer=tensor_digest({key: value for key, value in moments.items() if not is_own(key)}),
        experts=tensor_digest({key: v for key, v in (parameters | moments).items() if is_own(key)}) if own else None,
    )


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of named tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def gradient_witnesses(
    names: Iterable[str], gradient: Callable[[str], torch.Tensor], *, seed: int
) -> tuple[GradientWitness, ...]:
    """Return norm and seeded projection of every group of tensors, in order of their names.

    A projection is 64 sums of the group's gradient under random signs: element i goes, with a random sign, into sum
    h(i). Signs and places come from a generator seeded with `seed` and the tensor's name, on the CPU, so that every
    rank and every layout draws the same.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        module, _, factor = name.partition(".lora_")
        groups.setdefault(f"{module.rsplit('.', 1)[-1]}.lora_{factor.split('.')[0]}", []).append(name)
    witnesses = []
    for group, members in sorted(groups.items()):
        projection = torch.zeros(PROJECTION_SIZE, dtype=torch.float64)
        squared = 0.0
        for name in members:
            flat = gradient(name).detach().double().cpu().flatten()
            squared += float(flat @ flat)
            generator = torch.Generator().manual_seed(_seed(seed, name))
            places = torch.randint(PROJECTION_SIZE, flat.shape, generator=generator)
            signs = torch.randint(2, flat.shape, generator=generator).double() * 2 - 1
            projection.index_add_(0, places, flat * signs)
        witnesses.append(
            GradientWitness(group=group, tensors=len(members), norm=squared**0.5, projection=tuple(projection.tolist()))
        )
    return tuple(witnesses)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "little")

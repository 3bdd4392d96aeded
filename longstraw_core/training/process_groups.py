"""The ranks of one stage: process groups from megatron-core, and small exchanges of bytes. Knows no model."""

import datetime
import os
import socket
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.rank_sessions import Placement
from longstraw_core.training.heartbeat import Heartbeat

_POLL_SECONDS = 0.05


class LostRank(ConnectionError):
    """This rank stops because of another one, which reports why."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a stage. `Ranks.alone()` is the one process that needs no others."""

    rank: int
    size: int
    """Context-parallel ranks; they are all ranks there are."""
    expert_size: int
    """Ranks that share one set of experts; the expert-parallel groups fold onto the context-parallel ranks."""
    local_rank: int
    device: torch.device
    planned: Placement
    timeout_seconds: float = 0.0
    heartbeat: Heartbeat | None = None

    @classmethod
    def alone(cls, device: str = "cpu") -> "Ranks":
        """One process that owns every token and every expert."""
        used = torch.device("cuda:0" if device == "cuda" else device)
        here = Placement(host=socket.gethostname(), rank=0, device=str(used), accelerator=None)
        return cls(rank=0, size=1, expert_size=1, local_rank=0, device=used, planned=here)

    @cached_property
    def groups(self) -> "MegatronGroups":
        """megatron-core's groups; built when first asked for, which every rank must do at the same point."""
        return MegatronGroups(self)

    @property
    def context(self) -> RankGroup:
        """The ranks that share the tokens of every prompt and response."""
        return RankGroup.alone() if self.size == 1 else self.groups.context

    @property
    def experts(self) -> RankGroup:
        """The ranks that share the experts."""
        return RankGroup.alone() if self.expert_size == 1 else self.groups.experts

    def enter(self, phase: str) -> None:
        """Tell the launcher what this rank does now."""
        if self.heartbeat is not None:
            self.heartbeat.enter(phase)

    def gather(self, content: bytes) -> list[bytes]:
        """Return what every rank gave, in order of rank, on every rank."""
        if self.size == 1:
            return [content]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(content)]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else padded[:0]
        received = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded)
        return [bytes(tensor[: int(length)].numpy()) for tensor, length in zip(received, lengths, strict=True)]

    def any(self, value: bool) -> bool:
        """Whether `value` holds on any rank; the same answer on every rank."""
        return any(flag == b"1" for flag in self.gather(b"1" if value else b"0"))

    def patiently(self, action: Callable[[], None] | None) -> None:
        """Run `action` on the ranks that have one while all others wait for them, however long it takes.

        Raises:
            Exception: what this rank's own action raised.
            ConnectionError, RuntimeError: another rank's action failed, and that rank is gone.
        """
        if self.size == 1:
            if action is not None:
                action()
            return
        with ThreadPoolExecutor(1) as pool:
            future = None if action is None else pool.submit(action)
            while self.any(future is not None and not future.done()):
                time.sleep(_POLL_SECONDS)
        failed = self.any(future is not None and future.exception() is not None)
        if future is not None:
            future.result()
        if failed:
            self.gather(b"")  # until it has reported and is gone: who ends first is taken for the cause
            raise LostRank("another rank failed at what this one waited for")

    def once_per_host(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank of every host while the others wait."""
        self.patiently(action if self.local_rank == 0 else None)


class MegatronGroups:
    """Process groups of megatron-core's `parallel_state`, context parallel with experts folded onto it."""

    def __init__(self, ranks: Ranks) -> None:
        with warnings.catch_warnings():  # that its optional fast kernels are not installed
            warnings.simplefilter("ignore", UserWarning)
            from megatron.core import parallel_state
            from megatron.core.process_groups_config import ProcessGroupCollection
        self.parallel_state = parallel_state
        parallel_state.initialize_model_parallel(
            context_parallel_size=ranks.size,
            expert_model_parallel_size=ranks.expert_size,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=ranks.timeout_seconds / 60,  # type: ignore[arg-type]  # becomes a timedelta
        )
        self.collection = ProcessGroupCollection.use_mpu_process_groups()
        self.context = RankGroup.of(self.collection.cp)
        self.experts = RankGroup.of(self.collection.ep)


def available_device() -> str:
    """`cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_layout(context_parallel: int, expert_parallel: int) -> None:
    """Check that expert-parallel groups fold onto the context-parallel ranks.

    Raises:
        SpecError: they do not.
    """
    if context_parallel % expert_parallel:
        raise SpecError(
            f"layout.expert_parallel: {expert_parallel} does not divide the {context_parallel} context-parallel ranks; "
            "experts are sharded over the same ranks as tokens"
        )


def join_ranks(
    context_parallel: int,
    expert_parallel: int,
    *,
    device: str,
    host: str,
    timeout_seconds: float,
    heartbeat: Heartbeat | None = None,
) -> Ranks:
    """Join the ranks that torchrun started and build megatron-core's process groups.

    Args:
        context_parallel: ranks in all.
        expert_parallel: ranks that share one set of experts; divides `context_parallel`.
        device: `cpu` or `cuda`; a rank takes the device of its local number.
        host: where the launcher planned this rank.
        timeout_seconds: how long any exchange waits for a silent rank.

    Raises:
        SpecError: the layout does not fit the ranks, or there are fewer devices than ranks on this host.
    """
    check_layout(context_parallel, expert_parallel)
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if size != context_parallel:
        raise SpecError(f"layout.context_parallel: {context_parallel} asked for, {size} ranks were started")
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise SpecError(
                f"rank {rank} needs device cuda:{local_rank}, this host has {torch.cuda.device_count()}; "
                "start no more ranks than devices"
            )
        torch.cuda.set_device(local_rank)
    used = torch.device(f"cuda:{local_rank}" if device == "cuda" else "cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=used if device == "cuda" else None,
    )
    return Ranks(
        rank=rank,
        size=size,
        expert_size=expert_parallel,
        local_rank=local_rank,
        device=used,
        planned=Placement(host=host, rank=rank, device=str(used), accelerator=None),
        timeout_seconds=timeout_seconds,
        heartbeat=heartbeat,
    )


def leave_ranks(ranks: Ranks) -> None:
    """Wait until every rank is done, then take the groups down."""
    ranks.gather(b"")
    if "groups" in vars(ranks):
        ranks.groups.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()

"""This process' place in a group of ranks: what token mixers need to know of the distributed world."""

from dataclasses import dataclass
from typing import Self

import torch.distributed


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share the tokens of a prompt (context parallel) or the experts of a model (expert parallel)."""

    rank: int
    size: int
    process_group: torch.distributed.ProcessGroup | None
    """None when the process is alone: nothing is exchanged."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size}")
        if self.size > 1 and self.process_group is None:
            raise ValueError(f"{self.size} ranks need a process group to exchange with")

    @classmethod
    def alone(cls) -> Self:
        """Return the group of a single process."""
        return cls(0, 1, None)

    @classmethod
    def of(cls, process_group: torch.distributed.ProcessGroup) -> Self:
        """Return this process' place in an initialised process group."""
        size = torch.distributed.get_world_size(process_group)
        return cls(torch.distributed.get_rank(process_group), size, process_group if size > 1 else None)


ALONE = RankGroup.alone()

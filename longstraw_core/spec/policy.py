"""The `current` pointer of a policy: which checkpoint the next transaction of a team is to start from."""

from typing import Annotated, Literal

from pydantic import Field

from longstraw_core.spec.descriptors import Descriptor
from longstraw_core.spec.model import PositiveCount, StrictModel

PolicyName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?$")]


class PolicyPointer(StrictModel):
    """Where a policy stands now. The only artifact that changes: it moves from a checkpoint to a child of it."""

    kind: Literal["longstraw.policy/1"] = "longstraw.policy/1"
    policy: PolicyName
    checkpoint: Descriptor
    """Descriptor of the checkpoint manifest."""
    lineage: PositiveCount
    run: Annotated[str, Field(min_length=1)]
    transaction: PositiveCount

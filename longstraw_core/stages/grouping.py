"""Puts flat records back into the groups of their prompts, and refuses records that fit no group."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from longstraw_core.spec import IntegrityError, Prompt


class PromptRecord(Protocol):
    """A record that belongs to one response of one prompt."""

    @property
    def prompt_id(self) -> str:
        """The prompt."""
        ...

    @property
    def index(self) -> int:
        """Position in the prompt's group."""
        ...


Record = TypeVar("Record", bound=PromptRecord)


def by_prompt(prompts: Sequence[Prompt], records: Sequence[Record], group_size: int, what: str) -> list[list[Record]]:
    """Return one list of `group_size` records per prompt, in the order of prompts and of group positions.

    Raises:
        IntegrityError: a record is missing, doubled, or belongs to no prompt.
    """
    groups: dict[str, dict[int, Record]] = {prompt.prompt_id: {} for prompt in prompts}
    for record in records:
        group = groups.get(record.prompt_id)
        if group is None or record.index in group or record.index >= group_size:
            raise IntegrityError(f"{what}: record {record.prompt_id}[{record.index}] is unexpected or there twice")
        group[record.index] = record
    for prompt_id, group in groups.items():
        if len(group) != group_size:
            raise IntegrityError(f"{what}: prompt {prompt_id} has {len(group)} of {group_size} records")
    return [[groups[prompt.prompt_id][index] for index in range(group_size)] for prompt in prompts]

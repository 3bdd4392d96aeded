"""What a scorer says about one response, before penalties and group statistics."""

from dataclasses import dataclass
from typing import Literal

VerdictStatus = Literal["ok", "no_answer", "timeout", "bad_row"]


@dataclass(frozen=True)
class Verdict:
    """The reward of one response and what decided it.

    `bad_row` says that the ground truth cannot be compared with anything: an error of the row, so that
    `reward` has no meaning and nobody may train on it.
    """

    reward: float
    correct: bool
    status: VerdictStatus
    extracted: str | None
    rule: str
    canonical: str | None = None
    """The value that was compared, for people: a fraction in lowest terms where there is one."""

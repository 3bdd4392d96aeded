"""What a check reports, and running one so that its failure is a report and not an end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from longstraw_core.spec.errors import LongStrawError

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    status: Status
    found: str
    remedy: str = ""
    """What to do; given for every failure."""


@dataclass(frozen=True)
class Check:
    """One check: `run` returns what it found, raises a `LongStrawError` on a fault, or `Skipped`."""

    name: str
    run: Callable[[], str]
    remedy: str


class Skipped(Exception):
    """The check does not apply here; says why."""


def run_check(check: Check) -> Finding:
    """Run one check; whatever goes wrong is its finding."""
    try:
        return Finding(check.name, "ok", check.run())
    except Skipped as reason:
        return Finding(check.name, "skipped", str(reason))
    except LongStrawError as error:
        return Finding(check.name, "failed", " ".join(str(error).split()), check.remedy)
    except Exception as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(check.name, "failed", found, check.remedy)

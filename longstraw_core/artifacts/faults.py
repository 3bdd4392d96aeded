"""What verification found: one `Fault` per thing that is not as published, collected in a `VerifyReport`."""

from dataclasses import dataclass, field, replace
from typing import Literal

from longstraw_core.spec.receipts import StageName

FaultKind = Literal[
    "changed",
    "missing",
    "extra",
    "symlink",
    "special",
    "directory",
    "file",
    "malformed",
    "misplaced",
    "chain",
    "incomplete",
    "signature",
]
"""`changed`: other bytes than published. `malformed`: a receipt, manifest or index that cannot be one. `misplaced`: a
receipt that says it belongs elsewhere. `chain`: an input that is not what its producer wrote. `incomplete`: the run
directory carries no valid index. `signature`: a receipt that the expected key did not sign. `directory` and `file`: one
stands where the other is expected."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it was published."""

    kind: FaultKind
    path: str
    """File below the verified root, or URI."""
    expected: str
    observed: str
    message: str


@dataclass(frozen=True, slots=True)
class MissingStages:
    """Stages without a usable receipt in one transaction of a run."""

    run: str
    transaction: int
    missing: tuple[StageName, ...]
    """In the order in which stages run."""


@dataclass(slots=True)
class VerifyReport:
    """Everything a verification read and every fault it found."""

    faults: list[Fault] = field(default_factory=list[Fault])
    receipts: int = 0
    """Receipts read and checked."""
    blobs: int = 0
    """Distinct blobs re-hashed."""
    bytes: int = 0
    """Bytes re-hashed, blobs and receipts; for a run directory, all its files."""
    unreferenced: list[str] = field(default_factory=list[str])
    """What lies in `staging/`, and intact blobs that no receipt leads to, as killed stages leave them; harmless."""
    unchecked: list[str] = field(default_factory=list[str])
    """External inputs that are not reachable from here, as `<receipt name> <input>: <uri>`; not a fault."""

    incomplete: list[MissingStages] = field(default_factory=list[MissingStages])
    """Transactions that lack stages. Not faults: a run that was killed or lost its policy leaves them, and so does
    whoever removes the newest receipts."""

    @property
    def ok(self) -> bool:
        """Whether everything that is there is as published; see also `complete`."""
        return not self.faults

    @property
    def complete(self) -> bool:
        """Whether there is a run, and every transaction of every run that was read ends in `validate_run`'s receipt."""
        unsealed = any(fault.kind == "incomplete" for fault in self.faults)
        return self.receipts > 0 and not self.incomplete and not unsealed

    def include(self, other: "VerifyReport", *, prefix: str) -> None:
        """Add another report's faults, lists and counts (not its bytes), its relative paths moved below `prefix`."""
        for fault in other.faults:
            absolute = fault.path.startswith(("/", "file://"))
            self.faults.append(fault if absolute else replace(fault, path=prefix + fault.path))
        self.incomplete.extend(other.incomplete)
        self.receipts += other.receipts
        self.blobs += other.blobs
        self.unreferenced.extend(prefix + name for name in other.unreferenced)
        self.unchecked.extend(prefix + name for name in other.unchecked)

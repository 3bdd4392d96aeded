"""One walk over a store, from receipts and pointers to everything they reach, and the faults met on the way."""

from collections.abc import Mapping

from longstraw_core.artifacts.faults import VerifyReport
from longstraw_core.artifacts.files import FoundFile, Measured
from longstraw_core.artifacts.journals import parse_journal_name
from longstraw_core.artifacts.policy import parse_pointer
from longstraw_core.artifacts.receipts import RUNS_PREFIX
from longstraw_core.artifacts.snapshots import SNAPSHOT_PREFIX, parse_snapshot
from longstraw_core.artifacts.store import BLOB_PREFIX, POLICY_PREFIX, Store
from longstraw_core.artifacts.verification.chain import ChainCheck
from longstraw_core.artifacts.verification.completeness import missing_stages, transactions_of_policies
from longstraw_core.artifacts.verification.reach import Reach
from longstraw_core.artifacts.verification.reader import ObjectReader, shown_path
from longstraw_core.artifacts.verification.receipts import ReceiptReader
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.descriptors import check_relative_path
from longstraw_core.spec.errors import IntegrityError


class StoreWalk:
    """The parts of a verification, over shared state; call `finish` last.

    Every method raises SpecError or Retryable when the storage fails: then nothing is known, and no fault is claimed.
    """

    def __init__(self, store: Store, measured: Mapping[str, Measured] | None = None, *, external: bool = False) -> None:
        self.reader = ObjectReader(store, dict(measured or {}))
        self.receipts = ReceiptReader(self.reader)
        self.reach = Reach(self.reader, self.receipts)
        self.chain = ChainCheck(self.reader, self.receipts, self.reach, external)

    @property
    def report(self) -> VerifyReport:
        """What was found so far."""
        return self.reader.report

    def read_roots(self) -> None:
        """Read what keeps artifacts alive besides receipts: policy pointers and registered snapshots."""
        for found in (*self.reader.found(POLICY_PREFIX), *self.reader.found(SNAPSHOT_PREFIX)):
            if found.kind != "file":
                self.reader.not_a_file(found)
            else:
                self._read_root(found)

    def _read_root(self, found: FoundFile) -> None:
        expected = "a snapshot's descriptor" if found.path.startswith(SNAPSHOT_PREFIX) else "a pointer"
        try:
            check_relative_path(found.path)
        except ValueError as error:
            self.reader.fault("extra", shown_path(found.path), "nothing", f"{found.size} bytes", str(error))
            return
        content = self.reader.read(found.path, expected)
        if content is None:
            self.reader.unread.append(found.path)
            return
        try:
            if found.path.startswith(SNAPSHOT_PREFIX):
                self.reach.add(parse_snapshot(content, name=found.path), found.path)
            else:
                self.reach.follow_pointer(parse_pointer(content, name=found.path), found.path)
        except IntegrityError as error:
            self.reader.fault("malformed", shown_path(found.path), expected, sha256_digest(content), str(error))
            self.reader.unread.append(found.path)

    def ancestors_to_read(self) -> list[str]:
        """Runs that checkpoints came from and whose receipts were not read yet."""
        return sorted({run for run, _ in self.reach.transactions} - self.receipts.runs)

    def hash_everything(self) -> None:
        """Hash all blobs and report what does not belong in a store."""
        blobs: list[FoundFile] = []
        for found in self.reader.found(""):
            if found.path.startswith((RUNS_PREFIX, POLICY_PREFIX, SNAPSHOT_PREFIX)):
                continue  # seen with the receipts, or by read_roots
            shown = shown_path(found.path)
            if found.kind != "file":
                self.reader.not_a_file(found)
            elif found.path.startswith("staging/"):
                self.report.unreferenced.append(shown)  # of a writer that lives, or was killed: nobody reads it
            elif parse_journal_name(found.path) is not None:
                continue  # what launchers of multi-pod stages keep; nothing that a receipt reaches
            elif _is_blob(found.path):
                blobs.append(found)
            else:
                message = f"{shown} does not belong in a store: remove it"
                self.reader.fault("extra", shown, "nothing", f"{found.size} bytes", message)
        self._hash([found.path for found in sorted(blobs, key=lambda found: -found.size)])

    def hash_reached(self, *, whole_store: bool) -> None:
        """Hash the blobs that receipts lead to, unless already done, and compare each with its descriptor."""
        self.reach.follow_parents()
        self._hash([name for name in self.reach.blobs if name not in self.reader.present])
        for name, (descriptor, origin) in sorted(self.reach.blobs.items()):
            observed = self.reader.present.get(name)
            if observed is None:
                if name not in self.reader.reported:
                    wanted = f"{descriptor.digest} ({descriptor.size} bytes)"
                    self.reader.fault("missing", name, wanted, "nothing", f"blob is missing; named by {origin}")
            elif observed.size != descriptor.size and observed.digest == descriptor.digest:
                self.reader.fault(
                    "chain",
                    origin.partition(" ")[0],
                    f"{observed.size} bytes",
                    f"{descriptor.size} bytes",
                    f"{origin} gives a wrong size for {name}",
                )
        if whole_store:
            unreached = sorted(name for name in self.reader.present if name not in self.reach.blobs)
            self.report.unreferenced.extend(unreached)

    def finish(self) -> VerifyReport:
        """Say what the runs that were read lack, order the faults by path and return the report."""
        claimed = self.reach.transactions | transactions_of_policies(self.reader.store)
        self.report.incomplete = missing_stages(self.receipts.known.keys(), claimed)
        self.report.faults = sorted(dict.fromkeys(self.report.faults), key=lambda fault: (fault.path, fault.kind))
        return self.report

    def _hash(self, names: list[str]) -> None:
        self.reader.hash(names, {name: descriptor.size for name, (descriptor, _) in self.reach.blobs.items()})


def _is_blob(name: str) -> bool:
    digits = name.removeprefix(BLOB_PREFIX)
    return name.startswith(BLOB_PREFIX) and len(digits) == 64 and set(digits) <= set("0123456789abcdef")

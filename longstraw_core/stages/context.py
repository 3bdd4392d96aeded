"""What a stage sees while it runs: its specification, verified inputs, a scratch directory and the phase clock."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from longstraw_core.artifacts.external import require_external
from longstraw_core.artifacts.receipts import find_receipt, read_receipt
from longstraw_core.artifacts.store import Store
from longstraw_core.artifacts.trees import first_complaint, materialize_tree
from longstraw_core.spec import (
    CheckpointManifest,
    Descriptor,
    IntegrityError,
    SpecError,
    StageReceipt,
    TransactionSpec,
    canonical_json,
)
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON_LINES
from longstraw_core.spec.model import StrictModel
from longstraw_core.spec.receipts import Phase, StageName
from longstraw_core.stages.events import EventLog, current_memory_bytes, peak_memory_bytes

if TYPE_CHECKING:
    from longstraw_core.training.process_groups import Ranks

SNAPSHOT_INPUT = "external:model_snapshot"
DATA_INPUT = "external:data_file"
PARENT_INPUT = "external:parent_checkpoint"

Record = TypeVar("Record", bound=StrictModel)


@dataclass(frozen=True)
class StageResult:
    """What a stage hands back: its published outputs, measured values and one word for what happened."""

    outputs: dict[str, Descriptor]
    metrics: dict[str, float]
    status: str = "ok"
    facts: dict[str, str] = field(default_factory=dict[str, str])
    """What a reader of the receipt should know in words, for instance `reward: dapo_math:label`."""


@dataclass
class StageContext:
    """Inputs and tools of one stage execution; remembers everything that was read, for the receipt."""

    stage: StageName
    spec: TransactionSpec
    run: str
    transaction: int
    store: Store
    scratch: Path
    log: EventLog
    receipts: dict[StageName, StageReceipt]
    parent_checkpoint: Descriptor | None = None
    inputs: dict[str, Descriptor] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    parent_descriptor: Descriptor | None = None
    """Descriptor of what `parent_manifest` returned."""
    joined: "Ranks | None" = None
    """The ranks that execute the stage together; None for the one process of a stage without ranks."""

    @property
    def ranks(self) -> "Ranks":
        """This process among the ranks of the stage, on the device that it computes on."""
        if self.joined is None:
            from longstraw_core.training.process_groups import Ranks, available_device

            self.joined = Ranks.alone(available_device())
        return self.joined

    @property
    def leads(self) -> bool:
        """Whether this process writes what the stage publishes."""
        return self.joined is None or self.joined.rank == 0

    def once_per_host(self, action: Callable[[], None]) -> None:
        """Do on one rank of every host what the others of it only wait for; `scratch` is theirs together."""
        if self.joined is None:
            action()
        else:
            self.joined.once_per_host(action)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and announce it."""
        self.log.emit("phase", phase=name, memory_bytes=current_memory_bytes())
        if self.joined is not None:
            self.joined.enter(name)
        started = time.monotonic()
        yield
        self.phases.append(Phase(name=name, seconds=time.monotonic() - started, peak_memory_bytes=peak_memory_bytes()))

    def input(self, stage: StageName, output: str) -> Descriptor:
        """Descriptor of an upstream stage's output, as its receipt states it."""
        outputs = self.receipts[stage].predicate.outputs
        if output not in outputs:
            raise IntegrityError(f"receipt of {stage} has no output {output!r}; it lists {', '.join(sorted(outputs))}")
        self.inputs[f"{stage}/{output}"] = outputs[output]
        return outputs[output]

    def read_bytes(self, stage: StageName, output: str) -> bytes:
        """Verified content of an upstream output."""
        return self.store.get_bytes(self.input(stage, output))

    def read_records(self, stage: StageName, output: str, kind: type[Record]) -> tuple[Record, ...]:
        """Verified JSON Lines of an upstream output as models."""
        records: list[Record] = []
        for number, line in enumerate(self.read_bytes(stage, output).splitlines(), start=1):
            try:
                records.append(kind.model_validate_json(line))
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]
                place = ".".join(str(part) for part in problem["loc"])
                raise IntegrityError(f"{stage}/{output} line {number}: {place}: {problem['msg']}") from error
        return tuple(records)

    def write_records(self, records: Sequence[StrictModel]) -> Descriptor:
        """Publish models as canonical JSON Lines."""
        content = b"".join(canonical_json(record) + b"\n" for record in records)
        return self.store.put_blob(content, MEDIA_TYPE_JSON_LINES)

    def open_tree(self, stage: StageName, output: str) -> Path:
        """Directory with the verified files of an upstream tree output."""
        return self.materialize(self.input(stage, output), f"{stage}-{output}")

    def materialize(self, tree: Descriptor, name: str) -> Path:
        """Directory below the scratch directory with the verified files of a tree."""
        destination = self.scratch / name

        def materialize() -> None:
            materialize_tree(self.store, tree, destination)

        self.once_per_host(materialize)
        return destination

    @property
    def snapshot_descriptor(self) -> Descriptor:
        """The base model as `audit_data` described it: digest of its manifest, URI of its directory."""
        return self.receipts["audit_data"].predicate.inputs[SNAPSHOT_INPUT]

    def model_snapshot(self) -> Path:
        """The base model's directory, re-hashed against the manifest that `audit_data` recorded.

        Raises:
            IntegrityError: any file is missing, extra or different.
        """
        descriptor = self.snapshot_descriptor
        directory = Path(self.spec.model.snapshot)
        with self.phase("verify model snapshot"):
            self.once_per_host(lambda: require_external(self.store, descriptor, path=directory))
        self.inputs[SNAPSHOT_INPUT] = descriptor
        return directory

    def previous_receipt(self, stage: StageName) -> StageReceipt | None:
        """Receipt of a stage of the transaction before in this run, None for the first transaction."""
        if self.transaction == 1:
            return None
        descriptor = find_receipt(self.store, self.run, self.transaction - 1, stage)
        if descriptor is None:
            raise SpecError(
                f"transaction {self.transaction} follows transaction {self.transaction - 1}, whose {stage} has not "
                "finished; run the transactions in order"
            )
        self.inputs[f"previous:receipt:{stage}"] = descriptor
        return read_receipt(self.store, descriptor)

    def parent_manifest(self) -> CheckpointManifest | None:
        """The manifest of the checkpoint this transaction starts from, None for a fresh adapter.

        From the second transaction of a run on that is the checkpoint of the transaction before.

        Raises:
            SpecError: the parameter `parent_checkpoint` names another checkpoint than the transaction before wrote.
        """
        previous = self.previous_receipt("manifest_checkpoint")
        if previous is not None:
            descriptor = previous.predicate.outputs["checkpoint_manifest"]
            if self.parent_checkpoint not in (None, descriptor):
                raise SpecError(
                    f"parent_checkpoint {self.parent_checkpoint.digest} is not what transaction "
                    f"{self.transaction - 1} of this run wrote ({descriptor.digest}); leave it empty"
                )
            self.inputs["previous:manifest_checkpoint/checkpoint_manifest"] = descriptor
        else:
            descriptor = self._external_parent()
            if descriptor is None:
                return None
            self.inputs[PARENT_INPUT] = descriptor
        self.parent_descriptor = descriptor
        content = self.store.get_bytes(descriptor)
        try:
            return CheckpointManifest.model_validate_json(content)
        except ValidationError as error:
            raise IntegrityError(
                f"parent checkpoint {descriptor.digest} is not a checkpoint manifest: {first_complaint(error)}; "
                "pass the descriptor that manifest_checkpoint printed"
            ) from error

    @property
    def data_position(self) -> int:
        """Rows read by this transaction and all before it, counted over epochs."""
        metrics = self.receipts["audit_data"].predicate.metrics
        return int(metrics["data/position"] + metrics["prompts/count"])

    def _external_parent(self) -> Descriptor | None:
        """What the run starts from: `audit_data` takes the parameter, every later stage what `audit_data` recorded."""
        if self.stage == "audit_data":
            return self.parent_checkpoint
        recorded = self.receipts["audit_data"].predicate.inputs.get(PARENT_INPUT)
        if self.parent_checkpoint not in (None, recorded):
            started = "a fresh adapter" if recorded is None else recorded.digest
            raise SpecError(
                f"parent_checkpoint {self.parent_checkpoint.digest} is not what audit_data started from ({started}); "
                "one transaction has one parent: leave it empty here"
            )
        return recorded

    def parent_tree(self) -> Path | None:
        """Directory with the verified files of the parent checkpoint, None for a fresh adapter."""
        manifest = self.parent_manifest()
        return None if manifest is None else self.materialize(manifest.tree, "parent-checkpoint")

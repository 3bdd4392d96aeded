"""Stage receipts: in-toto Statements that say what a stage read, what it wrote and how it ran."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longstraw_core.spec.descriptors import Descriptor
from longstraw_core.spec.model import Count, FiniteFloat, PositiveCount, Sha256, StrictModel
from longstraw_core.spec.positions import YarnScaling

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
RECEIPT_PREDICATE_TYPE = "urn:longstraw:stage-receipt:1"

GradientMode = Literal["stopgrad", "exact", "response_adapter"]
StageName = Literal[
    "audit_data",
    "export_lora",
    "sample",
    "score_rewards",
    "capture_prefix",
    "old_logprobs",
    "train",
    "manifest_checkpoint",
    "validate_run",
]


class DigestSet(StrictModel):
    """in-toto's digest set, restricted to the one algorithm used here."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Subject(StrictModel):
    """One output of the stage: its name and digest (in-toto ResourceDescriptor)."""

    name: Annotated[str, Field(min_length=1)]
    digest: DigestSet


class Phase(StrictModel):
    """One timed phase of a stage on one rank."""

    name: str
    seconds: Annotated[FiniteFloat, Field(ge=0.0)]
    peak_memory_bytes: Count


class RankRecord(StrictModel):
    """The ordered phases one rank went through and where it ran."""

    rank: Count
    device: str
    phases: tuple[Phase, ...]


class ReceiptPredicate(StrictModel):
    """What produced the subjects: stage, inputs, code, image, layout, timings and measured values."""

    stage: StageName
    run: Annotated[str, Field(min_length=1)]
    transaction: PositiveCount
    spec_digest: Sha256
    source_digest: Sha256
    """Digest of the installed `longstraw_core` source tree."""
    image_digest: Sha256 | None
    """Digest of the container image, None when the stage ran outside a container."""
    gradient: GradientMode
    rope_scaling: YarnScaling | None = None
    """Positional scaling that was in force; None means the model's own positions."""
    seed: Count
    inputs: dict[str, Descriptor]
    """Every artifact that was read: receipts of producing stages (`receipt:<stage>`), their outputs
    (`<stage>/<output>`) and external files (`external:<name>`)."""
    outputs: dict[str, Descriptor]
    context_parallel: PositiveCount
    expert_parallel: PositiveCount
    ranks: tuple[RankRecord, ...]
    versions: dict[str, str]
    metrics: dict[str, FiniteFloat]
    status: str
    """One word for what happened, for instance `ok`, `no_signal` or `stepped`."""
    facts: Annotated[dict[str, str], Field(default_factory=dict)]
    """What a reader should know in words, for instance `reward`: kind and variant of the scorer."""


class StageReceipt(StrictModel):
    """An in-toto Statement v1 whose subjects are exactly the predicate's outputs."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")] = STATEMENT_TYPE
    subject: Annotated[tuple[Subject, ...], Field(min_length=1)]
    predicate_type: Annotated[Literal["urn:longstraw:stage-receipt:1"], Field(alias="predicateType")] = (
        RECEIPT_PREDICATE_TYPE
    )
    predicate: ReceiptPredicate

    model_config = StrictModel.model_config | {"serialize_by_alias": True, "validate_by_name": True}

    @model_validator(mode="after")
    def _subjects_are_outputs(self) -> "StageReceipt":
        subjects = {subject.name: subject.digest.sha256 for subject in self.subject}
        outputs = {name: descriptor.hex for name, descriptor in self.predicate.outputs.items()}
        if subjects != outputs or len(self.subject) != len(subjects):
            raise ValueError("receipt subjects and outputs disagree")
        return self

    @classmethod
    def for_predicate(cls, predicate: ReceiptPredicate) -> "StageReceipt":
        """Build the statement whose subjects are the predicate's outputs, sorted by name."""
        subjects = tuple(
            Subject(name=name, digest=DigestSet(sha256=descriptor.hex))
            for name, descriptor in sorted(predicate.outputs.items())
        )
        return cls(subject=subjects, predicate=predicate)


class CheckpointManifest(StrictModel):
    """Every byte of one checkpoint, where it came from and which receipts led to it."""

    kind: Literal["longstraw.checkpoint/1"] = "longstraw.checkpoint/1"
    run: Annotated[str, Field(min_length=1)]
    transaction: PositiveCount
    lineage: PositiveCount
    """How many transactions led to this policy, over all runs."""
    data_position: Count
    """Rows read so far, counted over epochs; the next transaction reads on from there."""
    stepped: bool
    """False when no group carried a signal: the adapter equals the parent's."""
    optimizer_steps: Count
    tree: Descriptor
    """Tree manifest of the checkpoint directory (adapter, optimizer state, random state, trainer state)."""
    files: tuple["CheckpointFile", ...]
    parent: Descriptor | None
    """The checkpoint manifest this one was trained from; None for a fresh adapter."""
    model_snapshot: Descriptor
    spec_digest: Sha256
    gradient: GradientMode
    receipts: dict[str, Sha256]
    """Digests of the receipts of the stages that produced this checkpoint, by stage name."""


class CheckpointFile(StrictModel):
    """One file of the checkpoint tree."""

    path: str
    digest: Sha256
    size: Count


CheckpointManifest.model_rebuild()

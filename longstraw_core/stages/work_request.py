"""What a launcher tells the pods it creates: which stage of which transaction to run, as one object in the store."""

from pydantic import ValidationError

from longstraw_core.artifacts.store import Store
from longstraw_core.cluster.placement import stage_prefix
from longstraw_core.spec import Descriptor, IntegrityError, TransactionSpec, canonical_json, sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON
from longstraw_core.spec.model import PositiveCount, Sha256, StrictModel
from longstraw_core.spec.receipts import StageName
from longstraw_core.stages.execute import StageRequest


class WorkRequest(StrictModel):
    """A `StageRequest` that can be stored."""

    stage: StageName
    spec: TransactionSpec
    run: str
    transaction: PositiveCount
    parent_checkpoint: Descriptor | None
    expected_receipts: dict[StageName, Sha256]

    @classmethod
    def of(cls, stage: StageName, request: StageRequest) -> "WorkRequest":
        """The request of a stage, whose name has been checked."""
        return cls(
            stage=stage,
            spec=request.spec,
            run=request.run,
            transaction=request.transaction,
            parent_checkpoint=request.parent_checkpoint,
            expected_receipts=dict(request.expected_receipts),
        )

    def to_stage_request(self) -> StageRequest:
        """The request as `run_stage` takes it."""
        return StageRequest(
            stage=self.stage,
            spec=self.spec,
            run=self.run,
            transaction=self.transaction,
            parent_checkpoint=self.parent_checkpoint,
            expected_receipts=dict(self.expected_receipts),
        )

    def descriptor(self) -> Descriptor:
        """Descriptor of the object that `store_request` creates."""
        content = canonical_json(self)
        digest = sha256_digest(content)
        prefix = stage_prefix(self.run, self.transaction, self.stage)
        return Descriptor(
            uri=f"{prefix}request-{digest.removeprefix('sha256:')}.json",
            digest=digest,
            size=len(content),
            media_type=MEDIA_TYPE_JSON,
        )


def store_request(store: Store, request: WorkRequest) -> Descriptor:
    """Store a request under its digest; storing it again succeeds."""
    descriptor = request.descriptor()
    return store.create_object(descriptor.uri, canonical_json(request), MEDIA_TYPE_JSON)


def read_request(store: Store, descriptor: Descriptor) -> WorkRequest:
    """Return the verified request.

    Raises:
        IntegrityError: it is missing, its digest differs, or it is no request.
    """
    content = store.get_bytes(descriptor)
    try:
        return WorkRequest.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise IntegrityError(f"{descriptor.uri} is not a request: {problem['msg']}; do not use it") from error

"""Specification, record, descriptor and receipt models; imports neither torch nor anything that does I/O."""

from longstraw_core.spec.canonical import canonical_json, parse_canonical_json, sha256_digest
from longstraw_core.spec.descriptors import Descriptor, TreeEntry, TreeManifest
from longstraw_core.spec.errors import (
    DataRefused,
    IncompleteRun,
    IntegrityError,
    LongStrawError,
    NumericError,
    Retryable,
    SpecError,
    StageFailed,
)
from longstraw_core.spec.receipts import CheckpointManifest, StageReceipt
from longstraw_core.spec.records import Prompt, ResponseLogprobs, Rollout, Score, ScoredGroup
from longstraw_core.spec.transaction import TransactionSpec

__all__ = [
    "CheckpointManifest",
    "DataRefused",
    "Descriptor",
    "IncompleteRun",
    "IntegrityError",
    "LongStrawError",
    "NumericError",
    "Prompt",
    "ResponseLogprobs",
    "Retryable",
    "Rollout",
    "Score",
    "ScoredGroup",
    "SpecError",
    "StageFailed",
    "StageReceipt",
    "TransactionSpec",
    "TreeEntry",
    "TreeManifest",
    "canonical_json",
    "parse_canonical_json",
    "sha256_digest",
]

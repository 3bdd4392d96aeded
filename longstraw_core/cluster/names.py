"""Names of the objects of one multi-pod stage: deterministic, so that a second attempt finds what the first left."""

import hashlib
import re

from longstraw_core.spec import canonical_json
from longstraw_core.spec.receipts import StageName

PLAN_ANNOTATION = "longstraw.io/plan"
"""Digest of the placement plan that an object was made from."""
INTENT_ANNOTATION = "longstraw.io/intent"
"""Token of the journaled intent that an object was created for."""
JOB_LABEL = "longstraw.io/job"
RUN_LABEL = "longstraw.io/run"
STAGE_LABEL = "longstraw.io/stage"
TRANSACTION_LABEL = "longstraw.io/transaction"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def object_name(*, store: str, run: str, transaction: int, stage: StageName, spec_digest: str) -> str:
    """Return `ls-<stage>-<10 hex digits>`, the name of the stage's Job and Service (a DNS-1035 label of at most 31).

    The digits are of SHA-256 over everything that tells two stages of one namespace apart; the store is part of it,
    because two teams may use the same run name.
    """
    identity = canonical_json([store, run, transaction, stage, spec_digest])
    return f"ls-{stage.replace('_', '-')}-{hashlib.sha256(identity).hexdigest()[:10]}"


def label_value(text: str) -> str:
    """Return `text` as a label value: unchanged where it is one, else shortened and ended with 8 digits of its hash."""
    if _LABEL_VALUE.fullmatch(text):
        return text
    digits = hashlib.sha256(text.encode("utf-8")).hexdigest()[:8]
    kept = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:50].strip("._-")
    return f"{kept}-{digits}" if kept else digits

"""Reads the metric history that a checkpoint carries, without loading its tensors."""

import json

from longstraw_core.artifacts.store import Store, blob_name
from longstraw_core.artifacts.trees import read_manifest
from longstraw_core.spec import Descriptor, IntegrityError
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON

TRAINER_STATE_FILE = "trainer_state.json"


def read_metric_history(store: Store, checkpoint: Descriptor) -> list[dict[str, float]]:
    """Metrics of every transaction that led to the checkpoint, oldest first.

    Args:
        store: The store that holds the checkpoint.
        checkpoint: Descriptor of the checkpoint's tree manifest.

    Raises:
        IntegrityError: the checkpoint has no trainer state, or it is not what its digest says.
    """
    for entry in read_manifest(store, checkpoint).entries:
        if entry.path == TRAINER_STATE_FILE:
            content = store.get_bytes(
                Descriptor(
                    uri=blob_name(entry.digest), digest=entry.digest, size=entry.size, media_type=MEDIA_TYPE_JSON
                )
            )
            return json.loads(content)["metric_history"]
    raise IntegrityError(f"checkpoint {checkpoint.digest} has no {TRAINER_STATE_FILE}")

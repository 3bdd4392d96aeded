"""Registered model snapshots: small named objects that keep a snapshot's manifest alive and let it be found."""

from pathlib import Path

from pydantic import ValidationError

from longstraw_core.artifacts.external import describe_external_tree
from longstraw_core.artifacts.store import Store, blob_name
from longstraw_core.artifacts.trees import first_complaint
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON, MEDIA_TYPE_TREE, Descriptor
from longstraw_core.spec.errors import IntegrityError

SNAPSHOT_PREFIX = "snapshots/"


def register_snapshot(store: Store, directory: Path) -> Descriptor:
    """Hash a snapshot where it lies, each file once, put its manifest into the store and register it.

    Returns:
        The external tree's descriptor; its digest is what `model.digest` pins.

    Raises:
        SpecError: the directory is missing or holds something that is no regular file.
    """
    snapshot = describe_external_tree(store, directory)
    # without the directory's place, which differs from machine to machine
    manifest = snapshot.model_copy(update={"uri": blob_name(snapshot.digest)})
    store.create_object(snapshot_name(snapshot.digest), canonical_json(manifest), MEDIA_TYPE_JSON)
    return snapshot


def snapshot_name(digest: str) -> str:
    """Object name under which a snapshot's manifest is registered."""
    return f"{SNAPSHOT_PREFIX}{digest.removeprefix('sha256:')}.json"


def parse_snapshot(content: bytes, *, name: str) -> Descriptor:
    """Descriptor of a registered manifest; raises IntegrityError when the object is anything else."""
    value = parse_canonical_json(content, name=name)
    try:
        manifest = Descriptor.model_validate(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a descriptor: {first_complaint(error)}") from error
    blob = blob_name(manifest.digest)
    if snapshot_name(manifest.digest) != name or manifest.uri != blob or manifest.media_type != MEDIA_TYPE_TREE:
        raise IntegrityError(
            f"{name} registers {manifest.digest} ({manifest.media_type}) as {manifest.uri}; do not use it"
        )
    return manifest

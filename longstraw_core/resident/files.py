"""Prompt state on disk: one safetensors shard per layer and a canonical JSON manifest that is written last."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longstraw_core.resident.identity import PrefixIdentity, prompt_token_digest
from longstraw_core.resident.layer_state import LayerState
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import TreeEntry
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.model import Count, StrictModel, TokenId

MANIFEST_NAME = "prefix.json"


class PrefixManifest(StrictModel):
    """Identity, prompt and shards of a stored prompt state."""

    kind: Literal["longstraw.prefix-state/1"] = "longstraw.prefix-state/1"
    identity: PrefixIdentity
    prompt_token_ids: tuple[TokenId, ...]
    chunk_starts: tuple[Count, ...]
    shards: tuple[TreeEntry, ...]
    """One per layer, in layer order; a layer without state (a prompt of one token) has an empty shard."""

    @model_validator(mode="after")
    def _chunks_cover_the_prompt(self) -> "PrefixManifest":
        captured = len(self.prompt_token_ids) - 1
        starts = self.chunk_starts
        ascending = all(before < after for before, after in itertools.pairwise((*starts, captured)))
        if captured < 0 or (starts[:1] != (0,) if captured else starts != ()) or not ascending:
            raise ValueError(f"chunks starting at {starts} do not cover {captured} captured tokens")
        return self


def save(
    directory: Path,
    identity: PrefixIdentity,
    prompt_token_ids: Sequence[int],
    chunk_starts: Sequence[int],
    layers: Sequence[LayerState],
) -> None:
    """Write shards, then the manifest. The same state always gives the same bytes.

    Raises:
        IntegrityError: `identity` names another prompt than the one captured.
    """
    _check_prompt(identity, prompt_token_ids)
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    for index, layer in enumerate(layers):
        path = directory / f"layer-{index:05d}.safetensors"
        exported = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.export().items()}
        save_file(exported, path)
        shards.append(TreeEntry(path=path.name, digest=_file_digest(path), size=path.stat().st_size))
    manifest = PrefixManifest(
        identity=identity,
        prompt_token_ids=tuple(prompt_token_ids),
        chunk_starts=tuple(chunk_starts),
        shards=tuple(shards),
    )
    (directory / MANIFEST_NAME).write_bytes(canonical_json(manifest))


def read_manifest(directory: Path, expected: PrefixIdentity) -> PrefixManifest:
    """Read the manifest and compare its identity with the expected one.

    Raises:
        IntegrityError: no manifest, an invalid one, or another identity; names the fields that differ.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise IntegrityError(f"{path}: no prompt state was completed here")
    try:
        manifest = PrefixManifest.model_validate(parse_canonical_json(path.read_bytes(), name=str(path)))
    except ValidationError as error:
        raise IntegrityError(f"{path}: not a prompt state manifest: {error.errors()[0]['msg']}") from error
    differences = [
        f"{field} is {getattr(manifest.identity, field)}, expected {getattr(expected, field)}"
        for field in PrefixIdentity.model_fields
        if getattr(manifest.identity, field) != getattr(expected, field)
    ]
    if differences:
        raise IntegrityError(f"{path}: stored for something else: {'; '.join(differences)}")
    _check_prompt(manifest.identity, manifest.prompt_token_ids)
    return manifest


def restore(
    directory: Path, expected: PrefixIdentity, prompt_token_ids: Sequence[int], layers: Sequence[LayerState]
) -> list[int]:
    """Fill empty layer states from the shards and return the chunk starts.

    Raises:
        IntegrityError: identity, digests, tensor names, shapes or dtypes differ.
    """
    manifest = read_manifest(directory, expected)
    _check_prompt(manifest.identity, prompt_token_ids)
    if len(manifest.shards) != len(layers):
        raise IntegrityError(f"{directory}: has {len(manifest.shards)} layers, the model has {len(layers)}")
    for shard, layer in zip(manifest.shards, layers, strict=True):
        path = directory / shard.path
        if not path.is_file() or path.stat().st_size != shard.size:
            raise IntegrityError(f"{path}: missing or not {shard.size} bytes long")
        digest = _file_digest(path)
        if digest != shard.digest:
            raise IntegrityError(f"{path}: digest is {digest}, the manifest says {shard.digest}")
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise IntegrityError(f"{path}: not a safetensors file: {error}") from error
        layer.restore(tensors, len(prompt_token_ids) - 1)
    return list(manifest.chunk_starts)


def _check_prompt(identity: PrefixIdentity, prompt_token_ids: Sequence[int]) -> None:
    digest = prompt_token_digest(prompt_token_ids)
    if identity.prompt_digest != digest:
        raise IntegrityError(f"prompt digest is {digest}, the identity says {identity.prompt_digest}")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()

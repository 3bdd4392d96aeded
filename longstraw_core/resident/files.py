"""Prompt state on disk: one safetensors shard per layer and rank, and a canonical JSON manifest that is written last.

`layer-NNNNN.safetensors` with one rank, `rank-NNNNN-of-NNNNN/layer-NNNNN.safetensors` with several. Ranks write their
own shards; the manifest is written by one of them from what all say. Any number of ranks can restore: what other ranks
stored is read layer by layer and only the owned part is kept.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longstraw_core.resident.identity import PrefixIdentity, prompt_token_digest
from longstraw_core.resident.layer_state import LayerState
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import TreeEntry
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.model import Count, PositiveCount, StrictModel, TokenId

MANIFEST_NAME = "prefix.json"


class PrefixManifest(StrictModel):
    """Identity, prompt and shards of a stored prompt state."""

    kind: Literal["longstraw.prefix-state/2"] = "longstraw.prefix-state/2"
    identity: PrefixIdentity
    adapter_steps: Count = 0
    """Optimizer steps that the adapter had taken when the prompt was captured."""
    ranks: PositiveCount = 1
    prompt_token_ids: tuple[TokenId, ...]
    chunk_starts: tuple[Count, ...]
    shards: tuple[TreeEntry, ...]
    """One per rank and layer, rank by rank, in layer order; a layer without state (a prompt of one token) has an empty
    shard. None at all when every stage captures the prompt again."""

    @model_validator(mode="after")
    def _chunks_cover_the_prompt(self) -> "PrefixManifest":
        captured = len(self.prompt_token_ids) - 1
        starts = self.chunk_starts
        ascending = all(before < after for before, after in itertools.pairwise((*starts, captured)))
        if len(self.shards) % self.ranks:
            raise ValueError(f"{len(self.shards)} shards cannot belong to {self.ranks} ranks")
        if captured < 0 or (starts[:1] != (0,) if captured else starts != ()) or not ascending:
            raise ValueError(f"chunks starting at {starts} do not cover {captured} captured tokens")
        return self


def shard_directory(rank: int, ranks: int) -> str:
    """Where a rank's shards lie below the state's directory; empty with one rank."""
    return "" if ranks == 1 else f"rank-{rank:05d}-of-{ranks:05d}"


def save_shards(directory: Path, layers: Sequence[LayerState], *, rank: int, ranks: int) -> tuple[TreeEntry, ...]:
    """Write one rank's shards and describe them. The same state always gives the same bytes."""
    folder = shard_directory(rank, ranks)
    (directory / folder).mkdir(parents=True, exist_ok=True)
    shards = []
    for index, layer in enumerate(layers):
        name = f"{folder}/layer-{index:05d}.safetensors".removeprefix("/")
        path = directory / name
        exported = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.export().items()}
        save_file(exported, path)
        shards.append(TreeEntry(path=name, digest=_file_digest(path), size=path.stat().st_size))
    return tuple(shards)


def write_manifest(directory: Path, manifest: PrefixManifest) -> None:
    """Write the manifest, after every rank's shards.

    Raises:
        IntegrityError: the identity names another prompt than the one captured.
    """
    _check_prompt(manifest.identity, manifest.prompt_token_ids)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST_NAME).write_bytes(canonical_json(manifest))


def save(
    directory: Path,
    identity: PrefixIdentity,
    prompt_token_ids: Sequence[int],
    chunk_starts: Sequence[int],
    layers: Sequence[LayerState],
) -> None:
    """Write the state of a single rank.

    Raises:
        IntegrityError: `identity` names another prompt than the one captured.
    """
    _check_prompt(identity, prompt_token_ids)
    shards = save_shards(directory, layers, rank=0, ranks=1)
    manifest = PrefixManifest(
        identity=identity,
        prompt_token_ids=tuple(prompt_token_ids),
        chunk_starts=tuple(chunk_starts),
        shards=shards,
    )
    write_manifest(directory, manifest)


def read_manifest(directory: Path, expected: PrefixIdentity) -> PrefixManifest:
    """Read the manifest and compare its identity with the expected one.

    Raises:
        IntegrityError: no manifest, an invalid one, or another identity; names the fields that differ.
    """
    manifest = read_any_manifest(directory)
    path = directory / MANIFEST_NAME
    differences = [
        f"{field} is {getattr(manifest.identity, field)}, expected {getattr(expected, field)}"
        for field in PrefixIdentity.model_fields
        if getattr(manifest.identity, field) != getattr(expected, field)
    ]
    if differences:
        raise IntegrityError(f"{path}: stored for something else: {'; '.join(differences)}")
    _check_prompt(manifest.identity, manifest.prompt_token_ids)
    return manifest


def read_any_manifest(directory: Path) -> PrefixManifest:
    """Read a manifest, whatever it was stored for.

    Raises:
        IntegrityError: there is none, or it is invalid.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise IntegrityError(f"{path}: no prompt state was completed here")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(content: bytes, name: str) -> PrefixManifest:
    """Read the bytes of a manifest; `name` says in messages where they are from."""
    try:
        return PrefixManifest.model_validate(parse_canonical_json(content, name=name))
    except ValidationError as error:
        raise IntegrityError(f"{name}: not a prompt state manifest: {error.errors()[0]['msg']}") from error


def restore(
    directory: Path,
    expected: PrefixIdentity,
    prompt_token_ids: Sequence[int],
    wanted: PromptOwnership,
    layers: Sequence[LayerState],
) -> list[int]:
    """Fill empty layer states with what this rank owns and return the chunk starts.

    Raises:
        IntegrityError: identity, digests, tensor names, shapes or dtypes differ.
    """
    manifest = read_manifest(directory, expected)
    _check_prompt(manifest.identity, prompt_token_ids)
    tokens = len(manifest.prompt_token_ids) - 1
    if wanted.ranks > 1 and wanted.chunk_starts != manifest.chunk_starts:
        raise IntegrityError(f"{directory}: chunks start at {manifest.chunk_starts}, expected {wanted.chunk_starts}")
    wanted = dataclasses.replace(wanted, chunk_starts=manifest.chunk_starts)
    stored = [PromptOwnership(manifest.chunk_starts, tokens, rank, manifest.ranks) for rank in range(manifest.ranks)]
    per_rank = len(manifest.shards) // manifest.ranks
    if per_rank != len(layers):
        raise IntegrityError(f"{directory}: has {per_rank} layers, the model has {len(layers)}")
    for index, layer in enumerate(layers):
        shards = manifest.shards[index::per_rank]
        if manifest.ranks == wanted.ranks:
            tensors = _load_shard(directory, shards[wanted.rank])
        else:
            tensors = layer.reshard([_load_shard(directory, shard) for shard in shards], stored, wanted)
        layer.restore(tensors, wanted)
    return list(manifest.chunk_starts)


def _load_shard(directory: Path, shard: TreeEntry) -> dict[str, torch.Tensor]:
    path = directory / shard.path
    if not path.is_file() or path.stat().st_size != shard.size:
        raise IntegrityError(f"{path}: missing or not {shard.size} bytes long")
    digest = _file_digest(path)
    if digest != shard.digest:
        raise IntegrityError(f"{path}: digest is {digest}, the manifest says {shard.digest}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise IntegrityError(f"{path}: not a safetensors file: {error}") from error


def _check_prompt(identity: PrefixIdentity, prompt_token_ids: Sequence[int]) -> None:
    digest = prompt_token_digest(prompt_token_ids)
    if identity.prompt_digest != digest:
        raise IntegrityError(f"prompt digest is {digest}, the identity says {identity.prompt_digest}")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()

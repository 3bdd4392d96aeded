"""Prompt state on disk: deterministic bytes, exact restore, and hostile or foreign files that must be refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstraw_core.resident import PrefixIdentity, PrefixState, prompt_token_digest
from longstraw_core.spec.canonical import canonical_json, sha256_digest
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.positions import YarnScaling
from tests.resident.test_resident_state import filled_state, make_layers, pool

IDENTITY = PrefixIdentity(
    snapshot_digest=sha256_digest(b"model"),
    adapter_digest=sha256_digest(b"adapter"),
    prompt_digest=prompt_token_digest(range(11)),
    gradient="exact",
    reference=False,
)


def empty_state() -> PrefixState:
    return PrefixState(pool(), range(11), make_layers)


def rewrite_manifest(directory: Path, shard: Path) -> None:
    """What an attacker with write access would do: make the manifest agree with a changed shard."""
    manifest = json.loads((directory / "prefix.json").read_bytes())
    for entry in manifest["shards"]:
        if entry["path"] == shard.name:
            entry |= {"digest": sha256_digest(shard.read_bytes()), "size": shard.stat().st_size}
    (directory / "prefix.json").write_bytes(canonical_json(manifest))


def test_restore_gives_the_saved_state_and_saving_again_the_same_bytes(tmp_path: Path) -> None:
    original = filled_state(pool())
    original.save(tmp_path / "a", IDENTITY)
    restored = empty_state()
    restored.restore(tmp_path / "a", IDENTITY)
    assert restored.chunk_starts == original.chunk_starts
    for ours, theirs in zip(restored.layers, original.layers, strict=True):
        assert ours.length == theirs.length
        for (name, block), (other_name, other) in zip(ours.blocks(), theirs.blocks(), strict=True):
            assert name == other_name
            assert torch.equal(block, other)
    restored.save(tmp_path / "b", IDENTITY)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["layer-00000.safetensors", "layer-00001.safetensors", "prefix.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("snapshot_digest", sha256_digest(b"other model")),
        ("adapter_digest", None),
        ("prompt_digest", prompt_token_digest([1, 2])),
        ("gradient", "stopgrad"),
        ("reference", True),
        ("rope_scaling", YarnScaling(type="yarn", factor=2.0, original_positions=64)),
    ],
)
def test_another_identity_is_refused_by_field(tmp_path: Path, field: str, value: object) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    with pytest.raises(IntegrityError, match=f"stored for something else: {field} is"):
        empty_state().restore(tmp_path, IDENTITY.model_copy(update={field: value}))


def test_an_identity_of_another_prompt_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="prompt digest"):
        filled_state(pool()).save(tmp_path, IDENTITY.model_copy(update={"prompt_digest": prompt_token_digest([1])}))


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    shard = tmp_path / "layer-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match=r"layer-00000.*digest is sha256"):
        empty_state().restore(tmp_path, IDENTITY)


def test_a_truncated_or_missing_shard_is_refused(tmp_path: Path) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    shard = tmp_path / "layer-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match=r"layer-00001.*missing or not"):
        empty_state().restore(tmp_path, IDENTITY)
    shard.unlink()
    with pytest.raises(IntegrityError, match=r"layer-00001.*missing or not"):
        empty_state().restore(tmp_path, IDENTITY)


def test_no_manifest_means_nothing_was_completed(tmp_path: Path) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    (tmp_path / "prefix.json").unlink()
    with pytest.raises(IntegrityError, match="no prompt state was completed here"):
        empty_state().restore(tmp_path, IDENTITY)


@pytest.mark.parametrize("change", ["drop", "reshape", "recast", "add"])
def test_pages_that_do_not_fit_are_refused_even_when_digests_agree(tmp_path: Path, change: str) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    shard = tmp_path / "layer-00000.safetensors"
    tensors = load_file(shard)
    if change == "drop":
        del tensors["page.000001"]
    elif change == "reshape":
        tensors["page.000001"] = tensors["page.000001"][:, :, :3].contiguous()
    elif change == "recast":
        tensors["page.000001"] = tensors["page.000001"].double()
    else:
        tensors["page.000009"] = tensors["page.000001"].clone()
    save_file(tensors, shard)
    rewrite_manifest(tmp_path, shard)
    with pytest.raises(IntegrityError, match=r"layer 0"):
        empty_state().restore(tmp_path, IDENTITY)


def test_a_shard_path_cannot_leave_the_directory(tmp_path: Path) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    manifest = json.loads((tmp_path / "prefix.json").read_bytes())
    manifest["shards"][0]["path"] = "../layer-00000.safetensors"
    (tmp_path / "prefix.json").write_bytes(canonical_json(manifest))
    with pytest.raises(IntegrityError, match="not a prompt state manifest"):
        empty_state().restore(tmp_path, IDENTITY)


@pytest.mark.parametrize("starts", [[], [3], [0, 6, 6], [6, 0], [0, 10]])
def test_chunks_that_do_not_cover_the_prompt_are_refused(tmp_path: Path, starts: list[int]) -> None:
    filled_state(pool()).save(tmp_path, IDENTITY)
    manifest = json.loads((tmp_path / "prefix.json").read_bytes()) | {"chunk_starts": starts}
    (tmp_path / "prefix.json").write_bytes(canonical_json(manifest))
    with pytest.raises(IntegrityError, match="do not cover 10 captured tokens"):
        empty_state().restore(tmp_path, IDENTITY)

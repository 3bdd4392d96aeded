"""The adapter in the server's names is the same function, and whole groups of fused projections are adapted."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longstraw_core.rollout.served_adapter import write_served_adapter
from longstraw_core.spec import IntegrityError, SpecError
from longstraw_core.spec.transaction import LoraSpec, ModelSpec
from longstraw_core.training.lora import load_adapter
from longstraw_core.training.model import load_base_model
from tests.support.sglang.oracle import SERVED, hybrid_adapter

GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
)


def deltas(adapter: Path) -> dict[str, torch.Tensor]:
    """B·A of every module, by PEFT's module name."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removesuffix(".lora_A.weight"): tensors[name.replace("lora_A", "lora_B")] @ tensor
        for name, tensor in tensors.items()
        if "lora_A" in name
    }


@pytest.mark.parametrize(
    "targets",
    [SERVED, ("q_proj", "v_proj"), ("k_proj", "v_proj"), ("up_proj",), ("in_proj_z",), ("in_proj_qkv", "down_proj")],
    ids=",".join,
)
def test_every_weight_changes_by_what_it_changed_by_before(
    untrained_snapshot: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=targets)
    write_served_adapter(tmp_path / "adapter", untrained_snapshot, tmp_path / "served")
    before, after = deltas(tmp_path / "adapter"), deltas(tmp_path / "served")
    for module, delta in before.items():
        if module.endswith("in_proj_qkv"):
            parts = [after[module.replace("in_proj_qkv", f"in_proj_{part}")] for part in "qkv"]
            assert torch.equal(torch.cat(parts), delta)
        else:
            assert torch.equal(after[module], delta)
    added = {module for module in after if module not in before and not module.endswith(("_q", "_k", "_v"))}
    assert all(not after[module].any() for module in added)
    present = {(module.rpartition(".")[0], module.rpartition(".")[2]) for module in after}
    for parent, name in present:
        for group in GROUPS:
            if name in group:
                assert {(parent, other) for other in group} <= present
    config = json.loads((tmp_path / "served" / "adapter_config.json").read_text())
    names = {name for _, name in present}
    fused = {"in_proj_qkvz"} if "in_proj_q" in names else set()
    assert set(config["target_modules"]) == {name for name in names if name not in GROUPS[2]} | fused
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)


def test_an_adapter_without_delta_net_projections_gives_identical_logits_in_peft(
    untrained_snapshot: Path, tmp_path: Path
) -> None:
    model = hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=("q_proj", "up_proj", "out_proj"))
    write_served_adapter(tmp_path / "adapter", untrained_snapshot, tmp_path / "served")
    spec = ModelSpec(snapshot=str(untrained_snapshot), family="qwen3_5_text", dtype="float32")
    reloaded = PeftModel.from_pretrained(load_base_model(untrained_snapshot, spec), str(tmp_path / "served")).eval()
    again = load_adapter(
        load_base_model(untrained_snapshot, spec),
        tmp_path / "adapter",
        expected=LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "up_proj", "out_proj")),
    )
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(again(input_ids=ids, use_cache=False).logits, expected)
        # more modules are wrapped here, by adapters of zero
        assert torch.equal(reloaded(input_ids=ids, use_cache=False).logits, expected)


def test_equal_adapters_give_equal_bytes(untrained_snapshot: Path, tmp_path: Path) -> None:
    hybrid_adapter(untrained_snapshot, tmp_path / "adapter")
    for name in ("one", "two"):
        write_served_adapter(tmp_path / "adapter", untrained_snapshot, tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_tensors_of_no_module_or_of_another_size_are_refused_and_nothing_is_written(
    untrained_snapshot: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    hybrid_adapter(untrained_snapshot, adapter, targets=("q_proj",))
    path = adapter / "adapter_model.safetensors"
    good = load_file(path)
    name = next(iter(good))
    for tensors, message in (
        (good | {name.replace("layers.1", "layers.77"): good[name].clone()}, "layers.77.*belongs to no linear module"),
        (good | {name.replace("lora_A", "lora_C"): good[name].clone()}, "belongs to no linear module"),
        (good | {name: good[name][:, :5].contiguous()}, "the base model's weight is"),
        ({key: value for key, value in good.items() if key != name}, "lacks one of lora_A and lora_B"),
        ({key: value.flatten() for key, value in good.items()}, "the base model's weight is"),
        (of_rank_two(good, name), "and r is 4"),
        ({}, "holds no tensors"),
    ):
        save_file(tensors, path)
        with pytest.raises(SpecError, match=message):
            write_served_adapter(adapter, untrained_snapshot, tmp_path / "served")
        assert not (tmp_path / "served").exists()


def of_rank_two(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """One module's adapter with another rank than the configuration's 4."""
    other = name.replace("lora_A", "lora_B")
    return tensors | {name: tensors[name][:2].contiguous(), other: tensors[other][:, :2].contiguous()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(untrained_snapshot: Path, tmp_path: Path, value: float) -> None:
    hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=("q_proj",))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, path)
    with pytest.raises(IntegrityError, match="no finite numbers"):
        write_served_adapter(tmp_path / "adapter", untrained_snapshot, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_a_multimodal_snapshot_has_the_same_adapter_as_its_text_part(
    untrained_snapshot: Path, multimodal_snapshot: Path, tmp_path: Path
) -> None:
    hybrid_adapter(multimodal_snapshot, tmp_path / "adapter", targets=("in_proj_qkv", "k_proj"))
    write_served_adapter(tmp_path / "adapter", multimodal_snapshot, tmp_path / "wrapped")
    write_served_adapter(tmp_path / "adapter", untrained_snapshot, tmp_path / "text")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "wrapped" / file).read_bytes() == (tmp_path / "text" / file).read_bytes()

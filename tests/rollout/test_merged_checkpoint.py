"""A merged checkpoint is the model with its adapter, to the rounding of one addition; everything else is copied."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longstraw_core.rollout.merged_checkpoint import write_merged_checkpoint
from longstraw_core.spec import SpecError
from longstraw_core.spec.transaction import LoraSpec
from longstraw_core.training.lora import inject_adapter, save_adapter
from tests.engine.glm_oracle import tiny_base
from tests.support.sglang.oracle import fill, hybrid_adapter

IDS = torch.arange(3, 40)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_the_hybrid_with_every_target_merged(untrained_snapshot: Path, tmp_path: Path) -> None:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    model = hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=(*targets, "gate_proj", "down_proj"))
    changed = write_merged_checkpoint(untrained_snapshot, tmp_path / "adapter", tmp_path / "merged")
    assert changed == 2 * 4 + 2 * 5 + 4 * 2
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert (logits(merged) - logits(model)).abs().max() < 1e-4
    with model.disable_adapter():
        assert (logits(merged) - logits(model)).abs().max() > 0.1
    found = merged.state_dict()
    for name, value in model.merge_and_unload().state_dict().items():
        assert (found[name] - value).abs().max() < 1e-6, name
    for file in untrained_snapshot.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "merged" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "targets", ["all", ("experts.down_proj",), ("experts.gate_up_proj", "kv_b_proj")], ids=lambda names: str(names)
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused in the file", "one by one in the file"])
def test_experts_of_glm_merged(tmp_path: Path, targets: Any, fused: bool) -> None:
    base = tiny_base()
    base.save_pretrained(tmp_path / "snapshot")
    weights = tmp_path / "snapshot" / "model.safetensors"
    rewrite_experts(weights, fused=fused)
    model = inject_adapter(base, LoraSpec(rank=3, alpha=6.0, targets=targets), seed=0)
    fill(model, seed=2)
    save_adapter(model, tmp_path / "adapter")
    write_merged_checkpoint(tmp_path / "snapshot", tmp_path / "adapter", tmp_path / "merged")
    rewrite_experts(tmp_path / "merged" / "model.safetensors", fused=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    expected = dict(model.merge_and_unload().state_dict())
    found = merged.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-6, name


def rewrite_experts(weights: Path, *, fused: bool) -> None:
    """Store routed experts as two fused tensors a layer, or as three tensors an expert."""
    tensors = load_file(weights)
    for name in sorted(tensors):
        experts, found, rest = name.partition(".mlp.experts.")
        if not found:
            continue
        prefix = f"{experts}.mlp.experts"
        if not fused and rest == "gate_up_proj":
            gate_up, down = tensors.pop(name), tensors.pop(f"{prefix}.down_proj")
            for number in range(gate_up.shape[0]):
                gate, up = gate_up[number].chunk(2)
                tensors[f"{prefix}.{number}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}.{number}.up_proj.weight"] = up.clone()
                tensors[f"{prefix}.{number}.down_proj.weight"] = down[number].clone()
        if fused and rest == "0.gate_proj.weight":
            count = sum(key.startswith(prefix) and key.endswith(".up_proj.weight") for key in tensors)

            def stacked(part: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
                return torch.stack([tensors.pop(f"{prefix}.{number}.{part}.weight") for number in range(count)])

            gates, ups, downs = stacked("gate_proj"), stacked("up_proj"), stacked("down_proj")
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([gates, ups], dim=1)
            tensors[f"{prefix}.down_proj"] = downs
    save_file(tensors, weights, metadata={"format": "pt"})


def test_bfloat16_is_rounded_once(untrained_snapshot: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in untrained_snapshot.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    original = {name: value.bfloat16() for name, value in load_file(snapshot / "model.safetensors").items()}
    save_file(original, snapshot / "model.safetensors", metadata={"format": "pt"})
    model = hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=("o_proj",))
    write_merged_checkpoint(snapshot, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in merged.items():
        assert value.dtype == torch.bfloat16
        if "o_proj" not in name:
            assert torch.equal(value, original[name])
            continue
        delta = model.get_submodule("base_model.model." + name.removesuffix(".weight")).get_delta_weight("default")
        assert torch.equal(value, (original[name].float() + delta.detach()).bfloat16())


def test_an_adapter_of_something_else_is_refused(untrained_snapshot: Path, tmp_path: Path) -> None:
    hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=("q_proj",))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {name.replace("layers.1.", "layers.9."): value for name, value in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(SpecError, match=r"has no weight for layers\.9\.self_attn\.q_proj"):
        write_merged_checkpoint(untrained_snapshot, tmp_path / "adapter", tmp_path / "merged")


def test_an_adapter_of_another_rank_or_with_biases_is_refused(untrained_snapshot: Path, tmp_path: Path) -> None:
    hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=("q_proj",))
    path = tmp_path / "adapter" / "adapter_config.json"
    good = json.loads(path.read_text())
    for change, message in (({"r": 8}, "r is 8"), ({"bias": "lora_only"}, "bias is 'lora_only'")):
        path.write_text(json.dumps(good | change))
        with pytest.raises(SpecError, match=message):
            write_merged_checkpoint(untrained_snapshot, tmp_path / "adapter", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()


def test_what_is_not_added_to_a_weight_is_refused_and_not_left_out(untrained_snapshot: Path, tmp_path: Path) -> None:
    hybrid_adapter(untrained_snapshot, tmp_path / "adapter", targets=("q_proj",))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    good = load_file(path)
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    for extra in (f"{module}.lora_magnitude_vector", "base_model.model.model.embed_tokens.lora_embedding_A"):
        save_file(good | {extra: torch.ones(1)}, path)
        with pytest.raises(SpecError, match=rf"tensor {extra} has no lora_A or lora_B"):
            write_merged_checkpoint(untrained_snapshot, tmp_path / "adapter", tmp_path / "merged")
    for part in ("lora_A", "lora_B"):
        save_file({name: value for name, value in good.items() if name != f"{module}.{part}.weight"}, path)
        with pytest.raises(SpecError, match=r"layers.1.self_attn.q_proj.lora_[AB].weight has no lora_A or lora_B"):
            write_merged_checkpoint(untrained_snapshot, tmp_path / "adapter", tmp_path / "merged")
    save_file(good, path)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"fan_in_fan_out": True}))
    with pytest.raises(SpecError, match="fan_in_fan_out is set; only plain LoRA"):
        write_merged_checkpoint(untrained_snapshot, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_only_the_language_model_of_a_multimodal_snapshot_changes(multimodal_snapshot: Path, tmp_path: Path) -> None:
    model = hybrid_adapter(multimodal_snapshot, tmp_path / "adapter", targets=("q_proj", "in_proj_b"))
    assert write_merged_checkpoint(multimodal_snapshot, tmp_path / "adapter", tmp_path / "merged") == 4
    before = load_file(multimodal_snapshot / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    prefix = "model.language_model.layers."
    assert changed == {
        *(f"{prefix}{layer}.self_attn.q_proj.weight" for layer in (1, 3)),
        *(f"{prefix}{layer}.linear_attn.in_proj_b.weight" for layer in (0, 2)),
    }
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert (logits(merged) - logits(model)).abs().max() < 1e-4

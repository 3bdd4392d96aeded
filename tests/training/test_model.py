"""Loading snapshots: safetensors only, complete, of the right family."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ModelSpec
from longstraw_core.training.lora import inject_adapter, save_adapter
from longstraw_core.training.model import load_base_model, load_policy_model
from tests.engine.oracle import full_logprobs, tiny_base, tiny_config

SPEC = ModelSpec(snapshot="model", family="qwen3_5_text", dtype="float32")
LAYERS = ("linear_attention", "full_attention")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    tiny_base(LAYERS).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_base_and_adapter_come_back_frozen_and_in_evaluation_mode(snapshot: Path, tmp_path: Path) -> None:
    save_adapter(inject_adapter(tiny_base(LAYERS), LoraSpec(rank=2), seed=0), tmp_path / "adapter")
    model = load_policy_model(snapshot, tmp_path / "adapter", SPEC, lora=LoraSpec(rank=2))
    assert not model.training
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in model.named_parameters())
    with torch.no_grad():
        expected = full_logprobs(tiny_base(LAYERS), [1, 2], [3])  # type: ignore[arg-type]
        torch.testing.assert_close(full_logprobs(model, [1, 2], [3]), expected, rtol=0, atol=1e-5)


def test_bfloat16_keeps_the_adapter_in_float32(snapshot: Path, tmp_path: Path) -> None:
    save_adapter(inject_adapter(tiny_base(LAYERS), LoraSpec(rank=2), seed=0), tmp_path / "adapter")
    model = load_policy_model(snapshot, tmp_path / "adapter", SPEC.model_copy(update={"dtype": "bfloat16"}))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


@pytest.mark.parametrize(("change", "message"), [("missing", "lacks tensor"), ("misshapen", "has shape")])
def test_an_incomplete_snapshot_is_refused_by_tensor(snapshot: Path, change: str, message: str) -> None:
    path = snapshot / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("layers.1.self_attn.k_proj.weight"))
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=rf"{message}|layers\.1\.self_attn\.k_proj\.weight") as caught:
        load_base_model(snapshot, SPEC)
    assert "layers.1.self_attn.k_proj.weight" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_loaded(snapshot: Path) -> None:
    tensors = load_file(snapshot / "model.safetensors")
    (snapshot / "model.safetensors").unlink()
    torch.save(tensors, snapshot / "pytorch_model.bin")
    with pytest.raises(IntegrityError, match="cannot be loaded"):
        load_base_model(snapshot, SPEC)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no config.json"):
        load_base_model(tmp_path, SPEC)


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(SpecError, match="is a llama model, not qwen3_5_text"):
        load_base_model(tmp_path, SPEC)


def test_a_multimodal_checkpoint_is_read_as_its_text_model_and_its_wrapper_can_be_bound_too(tmp_path: Path) -> None:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "patch_size": 2,
    }
    torch.manual_seed(0)
    wrapper = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=tiny_config(LAYERS).to_dict(), vision_config=vision)
    ).eval()
    wrapper.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = full_logprobs(wrapper, [1, 2, 3], [4, 5])  # type: ignore[arg-type]
        for base in (load_base_model(tmp_path, SPEC), wrapper):
            policy = Policy(inject_adapter(base, LoraSpec(rank=2), seed=0), LayoutSpec(), gradient="exact")
            state = policy.capture([1, 2, 3], adapter=True)
            ours = policy.replay(state, [4, 5], temperature=1.0).logprobs_R
            torch.testing.assert_close(ours, expected, rtol=0, atol=5e-5)

"""Adapters of GLM: the targets asked for are the targets trained, experts' parameters in PEFT's format."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.transaction import LoraSpec
from longstraw_core.training.lora import inject_adapter, load_adapter, save_adapter, trainable_parameters
from tests.engine.glm_oracle import tiny_base
from tests.engine.oracle import full_logprobs

ATTENTION, DENSE, SHARED, EXPERTS = 5 * 5, 1 * 3, 4 * 3, 4 * 2


def adapter_with_weights(lora: LoraSpec) -> PeftModel:
    model = inject_adapter(tiny_base(), lora, seed=0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("attention", ATTENTION),
        ("attention+mlp", ATTENTION + DENSE + SHARED),
        ("all", ATTENTION + DENSE + SHARED + EXPERTS),
        (("gate_proj", "up_proj", "down_proj"), DENSE + SHARED),
        (("gate_proj",), (DENSE + SHARED) // 3),
        (("experts.down_proj",), EXPERTS // 2),
        (("kv_b_proj", "experts.gate_up_proj"), 5 + EXPERTS // 2),
    ],
)
def test_the_targets_asked_for_are_the_targets_trained(targets: object, expected: int) -> None:
    model = inject_adapter(tiny_base(), LoraSpec(rank=3, targets=targets), seed=0)  # type: ignore[arg-type]
    names = trainable_parameters(model)
    assert len(names) == 2 * expected
    assert not any("indexer" in name or ".gate." in name for name in names)
    for name, parameter in names.items():
        rank = parameter.shape[0 if "lora_A" in name else 1]
        assert rank == (3 * 8 if ".experts." in name else 3), name


@pytest.mark.parametrize("name", ["wq_b", "wk", "weights_proj", "gate"])
def test_indexer_and_router_are_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError, match=f"'{name}' is never trained"):
        inject_adapter(tiny_base(), LoraSpec(targets=("q_a_proj", name)), seed=0)


def test_an_unknown_target_lists_what_exists() -> None:
    with pytest.raises(SpecError, match=r"no module is called 'q_proj'; this model has down_proj, experts.down_proj"):
        inject_adapter(tiny_base(), LoraSpec(targets=("q_proj",)), seed=0)


@pytest.mark.parametrize("targets", ["all", ("q_b_proj", "experts.gate_up_proj"), ("experts.down_proj",)])
def test_saved_adapters_load_exactly(tmp_path: Path, targets: object) -> None:
    lora = LoraSpec(rank=3, alpha=5.0, targets=targets)  # type: ignore[arg-type]
    model = adapter_with_weights(lora)
    save_adapter(model, tmp_path)
    with torch.no_grad():
        expected = full_logprobs(model, [1, 2, 3], [4, 5])
        ours = load_adapter(tiny_base(), tmp_path, expected=lora)
        assert torch.equal(full_logprobs(ours, [1, 2, 3], [4, 5]), expected)
        if targets != "all":  # PEFT itself rewrites gate/up/down_proj when it loads
            theirs = PeftModel.from_pretrained(tiny_base(), tmp_path).eval()
            assert torch.equal(full_logprobs(theirs, [1, 2, 3], [4, 5]), expected)
    names = set(trainable_parameters(model))
    assert ("base_model.model.model.layers.1.mlp.experts.lora_A.weight" in names) or targets == ("q_b_proj",)


@pytest.mark.filterwarnings("ignore")
def test_stock_peft_cannot_load_adapters_of_gate_up_and_down_and_ours_can(tmp_path: Path) -> None:
    """docs/engine.md warns of this. When PEFT no longer rewrites the names, the warning can go."""
    for targets in ("attention+mlp", "all"):
        lora = LoraSpec(rank=3, targets=targets)
        model = adapter_with_weights(lora)
        save_adapter(model, tmp_path / targets)
        with torch.no_grad():
            expected = full_logprobs(model, [1, 2, 3], [4, 5])
            ours = full_logprobs(load_adapter(tiny_base(), tmp_path / targets, expected=lora), [1, 2, 3], [4, 5])
        assert torch.equal(ours, expected)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(tiny_base(), tmp_path / "attention+mlp").eval()
        assert (
            full_logprobs(theirs, [1, 2, 3], [4, 5])
            - full_logprobs(load_adapter(tiny_base(), tmp_path / "attention+mlp"), [1, 2, 3], [4, 5])
        ).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(tiny_base(), tmp_path / "all")

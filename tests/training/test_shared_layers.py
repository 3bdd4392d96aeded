"""Snapshots whose layers are loaded in shares, over two ranks, or in NF4: the gradients of whole weights."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.layer_weights import weights_on_use
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ModelSpec
from longstraw_core.training.lora import inject_adapter, save_adapter, trainable_parameters
from longstraw_core.training.model import keeping, load_base_model, load_policy_model
from tests.engine import glm_oracle, oracle
from tests.ranks import run_on_ranks

FAMILIES: dict[str, Any] = {"qwen3_5_text": oracle, "glm_moe_dsa": glm_oracle}
LAYOUT = LayoutSpec(prompt_chunk_tokens=25, page_tokens=16)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def spec(family: str, **fields: Any) -> ModelSpec:
    return ModelSpec.model_validate({"snapshot": "model", "family": family, "dtype": "float32", **fields})


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("snapshots")
    for family, module in FAMILIES.items():
        module.tiny_base().save_pretrained(directory / family)
        save_adapter(inject_adapter(module.tiny_base(), LoraSpec(rank=2), seed=0), directory / f"{family}-adapter")
    return directory


def gradient_and_logprobs(model: Any, context: RankGroup, experts: RankGroup) -> tuple[dict[str, Any], torch.Tensor]:
    policy = Policy(model, LAYOUT, gradient="exact", context=context, experts=experts)
    batch = oracle.random_batch(61, [7], seed=3)
    state = policy.capture(batch.prompt, adapter=True)
    logprobs_R = policy.replay(state, batch.responses[0], temperature=1.0).logprobs_R
    logprobs_R.mean().backward()
    policy.reverse_sweep(state)
    state.release()
    return {name: value.grad for name, value in trainable_parameters(model).items()}, logprobs_R.detach()


def _compare(rank: int, folder: str, quantisations: list[str | None]) -> None:
    group = RankGroup.of(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    for family in FAMILIES:
        for experts in (ALONE, group) if family == "glm_moe_dsa" else (ALONE,):
            for quantisation in quantisations:
                results = []
                for weights in ("replicated", "sharded"):
                    model_spec = spec(family, quantization=quantisation)
                    layout = LAYOUT.model_copy(update={"base_weights": weights})
                    model = load_policy_model(
                        Path(folder, family),
                        Path(folder, f"{family}-adapter"),
                        model_spec,
                        experts=experts,
                        kept=keeping(model_spec, layout, group),
                    )
                    on_use = weights_on_use(model.get_base_model())
                    assert (on_use is not None) == (weights == "sharded" or quantisation is not None)
                    results.append(gradient_and_logprobs(model, group, experts))
                (whole, whole_logprobs), (shared, shared_logprobs) = results
                assert torch.equal(whole_logprobs, shared_logprobs)
                for name, gradient in whole.items():
                    assert torch.equal(gradient, shared[name]), name


def test_shares_of_a_snapshot_give_the_bits_of_whole_weights(snapshots: Path, tmp_path: Path) -> None:
    run_on_ranks(2, _compare, str(snapshots), [None], directory=tmp_path / "run")


@needs_bitsandbytes
def test_shares_in_nf4_give_the_bits_of_whole_layers_in_nf4(snapshots: Path, tmp_path: Path) -> None:
    run_on_ranks(2, _compare, str(snapshots), ["nf4"], directory=tmp_path / "run")


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nf4_computes_with_what_bitsandbytes_makes_of_every_matrix(snapshots: Path, family: str, dtype: str) -> None:
    functional: Any = importlib.import_module("bitsandbytes.functional")

    nf4 = spec(family, dtype=dtype, quantization="nf4")
    model = load_base_model(snapshots / family, nf4, kept=keeping(nf4, LAYOUT, ALONE))
    weights = weights_on_use(model)
    assert weights is not None
    whole = load_base_model(snapshots / family, spec(family, dtype=dtype))
    rounded = 0
    with torch.no_grad():
        for index, layer in enumerate(whole.model.layers):
            weights.use(index)
            for name, parameter in layer.named_parameters():
                ours = model.get_parameter(f"model.layers.{index}.{name}")
                if torch.equal(ours, parameter):
                    continue
                assert not {"gate", "indexer", "conv1d"} & set(name.split("."))
                packed, state = functional.quantize_4bit(parameter.reshape(-1), blocksize=64, quant_type="nf4")
                parameter.copy_(functional.dequantize_4bit(packed, state).view_as(parameter))
                assert torch.equal(ours, parameter), name
                rounded += parameter.numel()
    assert weights.kept_bytes <= 0.6 * rounded
    lora = LoraSpec(rank=2)
    ours, expected = (
        gradient_and_logprobs(inject_adapter(base, lora, seed=0), ALONE, ALONE) for base in (model, whole)
    )
    assert torch.equal(ours[1], expected[1])
    assert all(torch.equal(ours[0][name], gradient) for name, gradient in expected[0].items())


def test_nf4_is_refused_where_bitsandbytes_is_missing(snapshots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    nf4 = spec("qwen3_5_text", quantization="nf4")
    with pytest.raises(SpecError, match=r"^model.quantization: nf4 needs the package bitsandbytes"):
        load_base_model(snapshots / "qwen3_5_text", nf4, kept=keeping(nf4, LAYOUT, ALONE))

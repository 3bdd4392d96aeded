"""YaRN from the specification to the angles: equal in transformers (the sampler) and in the engine (the trainer)."""

from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.rotary import rotary_angles, rotary_frequencies
from longstraw_core.spec.errors import DataRefused, SpecError
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ModelSpec
from longstraw_core.training.lora import inject_adapter
from longstraw_core.training.model import load_base_model
from tests.engine import glm_oracle
from tests.engine.oracle import (
    full_gradients,
    full_logprobs,
    gradients,
    random_batch,
    relative_error,
    surrogate,
    tiny_base,
    tiny_config,
    worst_relative_error,
)

SCALING = YarnScaling(type="yarn", factor=4.0, original_positions=64)
LAYERS = ("linear_attention", "full_attention")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_base(LAYERS, max_position_embeddings=64).save_pretrained(directory)
    return directory


def spec(scaling: YarnScaling | None) -> ModelSpec:
    return ModelSpec(snapshot="model", family="qwen3_5_text", dtype="float32", rope_scaling=scaling)


@pytest.mark.parametrize("factor", [2.0, 4.0, 40.0])
@pytest.mark.parametrize("positions", [64, 4096, 262_144])
def test_frequencies_and_amplitude_equal_transformers(factor: float, positions: int) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "factor": factor,
        "original_max_position_embeddings": positions,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    config = tiny_config(LAYERS, head_dim=256, rope_parameters=parameters)
    expected, expected_amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    inverse, amplitude = rotary_frequencies(parameters, 64, CPU)
    torch.testing.assert_close(inverse, expected, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(expected_amplitude, rel=1e-12)


def test_sampler_and_trainer_agree_on_positions_that_only_scaling_gives(snapshot: Path) -> None:
    base = load_base_model(snapshot, spec(SCALING))
    assert base.config.max_position_embeddings == 256
    model = inject_adapter(base, LoraSpec(rank=2), seed=0)
    policy = Policy(model, LayoutSpec(prompt_chunk_tokens=50, page_tokens=16), gradient="stopgrad")
    prompt, response = [token % 200 for token in range(7, 207)], [5, 6, 7]
    with torch.no_grad():
        state = policy.capture(prompt, adapter=True)
        ours = policy.replay(state, response, temperature=1.0).logprobs_R
        scaled = full_logprobs(model, prompt, response)
        native = full_logprobs(tiny_base(LAYERS, max_position_embeddings=64), prompt, response)  # type: ignore[arg-type]
    assert (ours - scaled).abs().max() <= 5e-5
    assert (scaled - native).abs().max() > 1e-3
    with pytest.raises(DataRefused, match="the model has 256"):
        policy.capture([1] * 257, adapter=True)


@pytest.fixture(scope="module")
def glm_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm")
    glm_oracle.tiny_base(max_position_embeddings=64).save_pretrained(directory)
    return directory


def test_glm_frequencies_and_amplitude_equal_transformers() -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 8_000_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 1_048_576,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    config = glm_oracle.tiny_config(qk_rope_head_dim=64, rope_parameters=parameters)
    expected, expected_amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    inverse, amplitude = rotary_frequencies(parameters, 64, CPU)
    torch.testing.assert_close(inverse, expected, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(expected_amplitude, rel=1e-12)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_glm_gradients_equal_the_full_sequence_on_positions_that_only_scaling_gives(
    glm_snapshot: Path, checkpoint_layers: bool
) -> None:
    model_spec = ModelSpec(snapshot="model", family="glm_moe_dsa", dtype="float32", rope_scaling=SCALING)
    base = load_base_model(glm_snapshot, model_spec)
    assert base.config.max_position_embeddings == 256
    model = inject_adapter(base, LoraSpec(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
    batch = random_batch(180, [9, 30])
    expected = full_gradients(model, batch)
    layout = LayoutSpec(prompt_chunk_tokens=50, page_tokens=16, checkpoint_layers=checkpoint_layers)
    policy = Policy(model, layout, gradient="exact")
    state = policy.capture(batch.prompt, adapter=True)
    model.zero_grad(set_to_none=True)
    for response, advantage in zip(batch.responses, batch.advantages, strict=True):
        logprobs_R = policy.replay(state, response, temperature=1.0).logprobs_R
        surrogate(logprobs_R, advantage, 2).backward()
        with torch.no_grad():
            assert (logprobs_R - full_logprobs(model, batch.prompt, response)).abs().max() <= 5e-5
    policy.reverse_sweep(state)
    ours = gradients(model)
    assert relative_error(ours, expected) <= 2e-5
    assert worst_relative_error(ours, expected) <= 5e-5
    with torch.no_grad():
        native = full_logprobs(glm_oracle.tiny_base(max_position_embeddings=64), batch.prompt, batch.responses[0])  # type: ignore[arg-type]
        scaled = full_logprobs(model, batch.prompt, batch.responses[0])
    assert (scaled - native).abs().max() > 1e-2
    with pytest.raises(DataRefused, match="the model has 256"):
        policy.capture([1] * 257, adapter=True)


def test_without_it_nothing_of_the_configuration_changes(snapshot: Path) -> None:
    base = load_base_model(snapshot, spec(None))
    assert base.config.max_position_embeddings == 64
    assert base.config.rope_parameters["rope_type"] == "default"


def test_scaling_for_another_model_or_on_top_of_another_is_refused(snapshot: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"original_positions is 128, the snapshot's max_position_embeddings is 64"):
        load_base_model(snapshot, spec(YarnScaling(type="yarn", factor=2.0, original_positions=128)))
    scaled = load_base_model(snapshot, spec(SCALING))
    scaled.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="already has rope type 'yarn'"):
        load_base_model(tmp_path, spec(YarnScaling(type="yarn", factor=2.0, original_positions=256)))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rope_type": "llama3"}, "rope type 'llama3' is not supported"), ({"mscale": 1.0}, "parameter 'mscale'")],
)
def test_other_rope_types_are_refused(change: dict[str, object], message: str) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(SpecError, match=message):
        rotary_frequencies(parameters | change, 8, CPU)


def test_positions_65535_and_65536_have_different_angles_that_bfloat16_positions_would_merge() -> None:
    parameters = {"rope_type": "default", "rope_theta": 10_000_000.0}
    inverse, amplitude = rotary_frequencies(parameters, 64, CPU)
    cos_TD, _ = rotary_angles(65_535, 2, inverse, amplitude)
    assert (cos_TD[0, 0] - cos_TD[1, 0]).abs() > 0.1
    assert torch.tensor(65_535).bfloat16() == torch.tensor(65_536).bfloat16()
    assert not torch.equal(cos_TD[0].bfloat16(), cos_TD[1].bfloat16())

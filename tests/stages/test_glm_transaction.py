"""A whole transaction of a small random GLM: sampled by transformers, trained, and published as a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from longstraw_core.artifacts import open_store, verify_store
from longstraw_core.spec import CheckpointManifest
from longstraw_core.training.tiny.tokenizer import END, PAD, VOCABULARY_SIZE, build_tokenizer
from tests.engine.glm_oracle import tiny_base
from tests.stages.scripted import AFTER_SAMPLE, BEFORE_SAMPLE, make_spec, run, run_transaction


@pytest.fixture(scope="module")
def glm_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm") / "model"
    tokenizer = build_tokenizer()
    ends = {"eos_token_id": tokenizer.get_vocab()[END], "pad_token_id": tokenizer.get_vocab()[PAD]}
    model = tiny_base(vocab_size=VOCABULARY_SIZE, **ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


@pytest.fixture
def glm_fields(spec_fields: dict[str, Any], glm_snapshot: Path) -> dict[str, Any]:
    return spec_fields | {"model": {"snapshot": str(glm_snapshot), "family": "glm_moe_dsa", "dtype": "float32"}}


def test_responses_that_transformers_samples_have_the_same_log_probabilities_in_the_trainer(
    glm_fields: dict[str, Any],
) -> None:
    """Nothing can be right about a random model's answers, so the transaction ends without a step, and says so."""
    spec = make_spec(glm_fields, "data.prompts_per_transaction=1", "sampling.group_size=2")
    outcomes = {stage: run(spec, stage).receipt.predicate for stage in (*BEFORE_SAMPLE, "sample", *AFTER_SAMPLE)}
    assert outcomes["train"].status == "no_signal"
    assert outcomes["old_logprobs"].metrics["sampling/sampling_logp_difference/max"] <= 5e-5
    assert "checkpoint_manifest" in outcomes["manifest_checkpoint"].outputs
    assert verify_store(open_store(spec.storage.uri)).faults == []


def test_a_group_with_a_signal_steps_and_its_checkpoint_is_published(glm_fields: dict[str, Any]) -> None:
    """Routed experts included (`lora.targets: all`)."""
    spec = make_spec(glm_fields, "data.prompts_per_transaction=1")
    outcomes = run_transaction(spec)
    train = outcomes["train"].receipt.predicate
    assert train.status == "stepped"
    assert train.gradient == "exact"
    assert train.metrics["grad_norm"] > 0
    assert {"replay", "reverse_sweep"} <= {phase.name for phase in train.ranks[0].phases}
    store = open_store(spec.storage.uri)
    manifest = CheckpointManifest.model_validate_json(
        store.get_bytes(outcomes["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"])
    )
    assert manifest.gradient == "exact"
    assert verify_store(store).faults == []

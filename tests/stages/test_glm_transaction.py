"""A whole transaction of a small random GLM: sampled by transformers, trained, and published as a checkpoint.

On ranks that share tokens and experts, and continued by one process.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load
from transformers import GenerationConfig

from longstraw_core.artifacts import open_store, read_manifest, verify_store
from longstraw_core.artifacts.store import blob_name
from longstraw_core.spec import CheckpointManifest, Descriptor, TransactionSpec
from longstraw_core.spec.rank_sessions import RankSessions, check_agreement
from longstraw_core.stages.execute import StageOutcome
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


ADAPTER, MOMENTS = "adapter/adapter_model.safetensors", "optimizer.safetensors"


def checkpoint_of(outcomes: dict[str, StageOutcome]) -> Descriptor:
    return outcomes["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"]


def files_of(spec: TransactionSpec, outcomes: dict[str, StageOutcome]) -> dict[str, bytes]:
    store = open_store(spec.storage.uri)
    tree = outcomes["train"].receipt.predicate.outputs["checkpoint"]
    return {
        entry.path: store.get_bytes(
            tree.model_copy(update={"uri": blob_name(entry.digest), "digest": entry.digest, "size": entry.size})
        )
        for entry in read_manifest(store, tree).entries
    }


def assert_alike(ours: dict[str, bytes], theirs: dict[str, bytes], before: dict[str, bytes]) -> None:
    """The same files and tensors; what the transaction changed in each file agrees to 1e-3 in relative L2."""
    assert ours.keys() == theirs.keys()
    for name in (ADAPTER, MOMENTS):
        mine, expected, start = (load(files[name]) for files in (ours, theirs, before))
        assert {key: x.shape for key, x in mine.items()} == {key: x.shape for key, x in expected.items()}
        error = sum(float((mine[key] - x).double().pow(2).sum()) for key, x in expected.items())
        moved = sum(float((x - start[key]).double().pow(2).sum()) for key, x in expected.items())
        assert error**0.5 <= 1e-3 * moved**0.5, name
    settings = "adapter/adapter_config.json"
    assert ours[settings] == theirs[settings]


def test_ranks_that_share_experts_continue_one_process_and_are_continued_by_one(glm_fields: dict[str, Any]) -> None:
    """Two ranks capture and score, four train with every expert on two of them; state and checkpoint fit them all."""
    overrides = ("data.prompts_per_transaction=1", "layout.selection_record=positions")
    alone = make_spec(glm_fields, *overrides)
    first, second, third = (run_transaction(alone, number) for number in (1, 2, 3))

    ranked = make_spec(glm_fields, *overrides, "name=ranked", "layout.context_parallel=2", "layout.expert_parallel=2")
    shared = run_transaction(ranked, parent=checkpoint_of(first), ranks={"train": 4})
    receipts = {stage: outcome.receipt.predicate for stage, outcome in shared.items()}
    assert [
        (receipts[stage].context_parallel, receipts[stage].expert_parallel)
        for stage in ("capture_prefix", "old_logprobs", "train")
    ] == [(2, 2), (2, 2), (4, 2)]
    assert receipts["train"].metrics["grad_norm"] == pytest.approx(
        second["train"].receipt.predicate.metrics["grad_norm"], rel=1e-4
    )
    assert_alike(files_of(ranked, shared), files_of(alone, second), files_of(alone, first))

    store = open_store(ranked.storage.uri)
    sessions = RankSessions.model_validate_json(store.get_bytes(receipts["train"].outputs["rank_sessions"]))
    check_agreement(sessions)
    experts = [session.after.experts for session in sessions.sessions]
    assert experts[:2] == experts[2:]
    assert len(set(experts)) == 2

    continued = make_spec(glm_fields, *overrides, "name=continued")
    after = run_transaction(continued, parent=checkpoint_of(shared))
    assert_alike(files_of(continued, after), files_of(alone, third), files_of(alone, second))
    assert verify_store(store).faults == []

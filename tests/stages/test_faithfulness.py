"""What is trained is what was sampled: honest responses pass, and each usual cause of a difference is caught."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from longstraw_core.artifacts import materialize_tree, open_store
from longstraw_core.rollout.transformers_sampler import sample_group
from longstraw_core.spec import Descriptor, NumericError, Prompt, Rollout, TransactionSpec
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.stages.execute import StageOutcome
from longstraw_core.training.model import load_policy_model

from .scripted import make_spec, prompts_of, publish_rollouts, run, run_transaction


@pytest.fixture
def short_model(untrained_snapshot: Path, tmp_path: Path) -> Path:
    """The small hybrid with 128 positions whose angles turn fast, so that prompts of some 60 tokens feel a scaling."""
    directory = tmp_path / "short-model"
    shutil.copytree(untrained_snapshot, directory)
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 128
    config["rope_parameters"]["rope_theta"] = 10000.0
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture
def policy(spec_fields: dict[str, Any], short_model: Path) -> tuple[TransactionSpec, Descriptor]:
    """A specification with the default limits, and a checkpoint whose adapter changes the model."""
    spec_fields["model"]["snapshot"] = str(short_model)
    first = make_spec(spec_fields, "name=first", "optimizer.learning_rate=0.05")
    outcomes = run_transaction(first)
    del spec_fields["sampling"]["faithfulness"]
    parent = outcomes["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"]
    return make_spec(spec_fields), parent


def before_sample(spec: TransactionSpec, parent: Descriptor) -> None:
    run(spec, "audit_data", parent=parent)
    run(spec, "export_lora")


def after_sample(spec: TransactionSpec) -> StageOutcome:
    run(spec, "capture_prefix")
    return run(spec, "old_logprobs")


def test_honest_responses_pass_and_the_receipt_has_the_figures(policy: tuple[TransactionSpec, Descriptor]) -> None:
    spec, parent = policy
    before_sample(spec, parent)
    run(spec, "sample")
    metrics = after_sample(spec).receipt.predicate.metrics
    assert metrics["faithfulness/responses"] == 8
    assert 0 <= metrics["faithfulness/mean"] <= metrics["faithfulness/max"] < 1e-4
    assert metrics["faithfulness/mean"] == metrics["sampling/sampling_logp_difference/mean"]
    run(spec, "score_rewards")
    trained = run(spec, "train").receipt.predicate
    page = open_store(spec.storage.uri).get_bytes(trained.outputs["report"]).decode()
    assert "faithfulness/mean" in page
    assert "faithfulness/max" in page


Sampler = Callable[[TransactionSpec, Path, Prompt], list[Rollout]]


def sample(spec: TransactionSpec, adapter: Path, prompt: Prompt, *, scaled: bool = False, adapted: bool = True) -> Any:
    model_spec = spec.model
    if scaled:
        scaling = YarnScaling(type="yarn", factor=16.0, original_positions=128)
        model_spec = model_spec.model_copy(update={"rope_scaling": scaling})
    model = load_policy_model(Path(spec.model.snapshot), adapter, model_spec)
    if not adapted:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
    tokenizer = AutoTokenizer.from_pretrained(spec.model.snapshot)
    return sample_group(model, tokenizer, prompt, spec.sampling, seed=spec.seed, transaction=1)


def without_the_adapter(spec: TransactionSpec, adapter: Path, prompt: Prompt) -> list[Rollout]:
    return sample(spec, adapter, prompt, adapted=False)


def with_another_rope_scaling(spec: TransactionSpec, adapter: Path, prompt: Prompt) -> list[Rollout]:
    return sample(spec, adapter, prompt, scaled=True)


def with_another_tokenizer(spec: TransactionSpec, adapter: Path, prompt: Prompt) -> list[Rollout]:
    """The sampler's ids mean other text than the trainer's: 0 to 385, read backwards."""

    def other(token: int) -> int:
        return 385 - token if token < 386 else token

    theirs = prompt.model_copy(update={"token_ids": tuple(map(other, prompt.token_ids))})
    return [
        rollout.model_copy(
            update={"prompt_token_ids": prompt.token_ids, "token_ids": tuple(map(other, rollout.token_ids))}
        )
        for rollout in sample(spec, adapter, theirs)
    ]


@pytest.mark.parametrize("sampler", [without_the_adapter, with_another_rope_scaling, with_another_tokenizer])
def test_responses_of_another_policy_stop_the_transaction(
    policy: tuple[TransactionSpec, Descriptor], tmp_path: Path, sampler: Sampler
) -> None:
    spec, parent = policy
    before_sample(spec, parent)
    store = open_store(spec.storage.uri)
    exported = run(spec, "export_lora").receipt.predicate.outputs["adapter"]
    materialize_tree(store, exported, tmp_path / "adapter")
    publish_rollouts(
        spec, [rollout for prompt in prompts_of(spec) for rollout in sampler(spec, tmp_path / "adapter", prompt)]
    )
    with pytest.raises(NumericError, match=r"sampler and trainer disagree: mean \|Δ log-prob\|"):
        after_sample(spec)
    assert not store.exists("runs/small/0001/old_logprobs/receipt.json")

"""A whole transaction through its stages: what is computed, what is refused, what is reused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw_core.artifacts import open_store, read_manifest, verify_store
from longstraw_core.spec import (
    CheckpointManifest,
    DataRefused,
    IntegrityError,
    NumericError,
    ScoredGroup,
    SpecError,
    TransactionSpec,
)
from longstraw_core.stages.execute import StageOutcome

from .scripted import (
    BEFORE_SAMPLE,
    group_rollouts,
    make_spec,
    prompts_of,
    publish_rollout_bytes,
    publish_rollouts,
    run,
    run_transaction,
)


def checkpoint_files(spec: TransactionSpec, outcome: StageOutcome) -> dict[str, str]:
    manifest = read_manifest(open_store(spec.storage.uri), outcome.receipt.predicate.outputs["checkpoint"])
    return {entry.path: entry.digest for entry in manifest.entries}


def adapter_digest(spec: TransactionSpec, outcome: StageOutcome) -> str:
    return checkpoint_files(spec, outcome)["adapter/adapter_model.safetensors"]


@pytest.mark.parametrize("gradient", ["exact", "stopgrad", "response_adapter"])
def test_two_transactions_step_twice_and_the_second_starts_from_the_first(
    spec_fields: dict[str, Any], gradient: str
) -> None:
    spec = make_spec(spec_fields, f"objective.gradient={gradient}", "objective.kl_coefficient=0.1")
    first, second = run_transaction(spec, 1), run_transaction(spec, 2)
    for number, outcomes in enumerate((first, second), start=1):
        train = outcomes["train"].receipt.predicate
        assert train.status == "stepped"
        assert train.gradient == gradient
        assert train.metrics["optimizer/steps"] == number
        assert train.metrics["grad_norm"] > 0
        phases = {phase.name for phase in train.ranks[0].phases}
        assert ("reverse_sweep" in phases) == (gradient == "exact")
    assert first["export_lora"].receipt.predicate.status == "fresh"
    assert second["export_lora"].receipt.predicate.status == "from_checkpoint"
    assert adapter_digest(spec, first["train"]) != adapter_digest(spec, second["train"])
    store = open_store(spec.storage.uri)
    manifests = [
        CheckpointManifest.model_validate_json(
            store.get_bytes(outcomes["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"])
        )
        for outcomes in (first, second)
    ]
    assert manifests[0].parent is None
    assert manifests[1].parent == first["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"]
    assert manifests[1].gradient == gradient
    history = json.loads(store.get_bytes(second["validate_run"].receipt.predicate.outputs["evidence"]))
    assert history["gradient"] == gradient
    assert verify_store(store).faults == []


def test_the_second_transaction_reads_other_prompts(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    run_transaction(spec, 1)
    run(spec, "audit_data", 2)
    first = {prompt.prompt_id for prompt in prompts_of(spec, 1)}
    second = {prompt.prompt_id for prompt in prompts_of(spec, 2)}
    assert not first & second


def test_the_same_seed_gives_the_same_checkpoint_bytes_and_another_seed_does_not(
    spec_fields: dict[str, Any], tmp_path: Path
) -> None:
    checkpoints, adapters = [], []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)  # what this process drew before must not matter
        spec = make_spec(spec_fields, f"storage.uri={(tmp_path / f'store{number}').as_uri()}", f"seed={seed}")
        train = run_transaction(spec)["train"]
        checkpoints.append(checkpoint_files(spec, train))
        adapters.append(adapter_digest(spec, train))
    history = "trainer_state.json"
    assert {**checkpoints[0], history: ""} == {**checkpoints[1], history: ""}
    assert adapters[0] != adapters[2]


def test_a_finished_stage_is_verified_and_reused(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    first = run_transaction(spec)
    for stage, outcome in first.items():
        again = run(spec, stage)
        assert again.reused
        assert again.descriptor == outcome.descriptor


def test_a_finished_stage_is_not_reused_for_another_specification(spec_fields: dict[str, Any]) -> None:
    run(make_spec(spec_fields), "audit_data")
    with pytest.raises(SpecError, match="another specification"):
        run(make_spec(spec_fields, "seed=4"), "audit_data")
    with pytest.raises(SpecError, match="another specification"):
        run(make_spec(spec_fields, "seed=4"), "export_lora")


def test_a_stage_without_its_inputs_says_which_stage_to_run(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    run(spec, "audit_data")
    with pytest.raises(SpecError, match="run sample first"):
        run(spec, "score_rewards")
    with pytest.raises(SpecError, match="run the transactions in order"):
        run(spec, "audit_data", 2)


def test_a_changed_byte_in_an_input_stops_the_next_stage(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    outcome = run(spec, "audit_data")
    blob = Path(spec.storage.uri.removeprefix("file://")) / outcome.receipt.predicate.outputs["prompts"].uri
    content = bytearray(blob.read_bytes())
    content[5] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(bytes(content))
    run(spec, "export_lora")
    with pytest.raises(IntegrityError, match="expected sha256"):
        run(spec, "capture_prefix")
    with pytest.raises(IntegrityError):
        run(spec, "audit_data")


def test_a_changed_model_file_stops_the_next_stage(
    spec_fields: dict[str, Any], untrained_snapshot: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in untrained_snapshot.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    spec = make_spec(spec_fields, f"model.snapshot={copy}")
    run(spec, "audit_data")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        run(spec, "export_lora")


def test_a_pinned_snapshot_digest_must_match(spec_fields: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"model\.digest: expected sha256:0000"):
        run(make_spec(spec_fields, f"model.digest=sha256:{'0' * 64}"), "audit_data")


def test_groups_without_variance_take_no_step_and_keep_the_adapter(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    outcomes = run_transaction(spec, right=0)
    train = outcomes["train"].receipt.predicate
    assert train.status == "no_signal"
    assert "grad_norm" not in train.metrics
    assert train.metrics["groups/skipped"] == 2
    adapter = read_manifest(open_store(spec.storage.uri), outcomes["export_lora"].receipt.predicate.outputs["adapter"])
    before = next(entry.digest for entry in adapter.entries if entry.path == "adapter_model.safetensors")
    assert adapter_digest(spec, outcomes["train"]) == before
    assert outcomes["manifest_checkpoint"].receipt.predicate.status == "no_signal"


def test_all_truncated_takes_no_step(spec_fields: dict[str, Any]) -> None:
    outcomes = run_transaction(make_spec(spec_fields), finish=["length"] * 4)
    assert outcomes["train"].receipt.predicate.status == "all_masked"


def test_some_truncated_leaves_them_out_of_numerator_and_denominator(spec_fields: dict[str, Any]) -> None:
    finish = ["stop", "length", "stop", "length"]
    train = run_transaction(make_spec(spec_fields), finish=finish)["train"].receipt.predicate
    assert train.status == "stepped"
    assert train.metrics["trained_responses"] == 4  # two of four in each of two groups
    assert train.metrics["trained_tokens"] == 2 * (1 + 3)


def rollouts_with(spec: TransactionSpec, **changes: Any) -> bytes:
    """The rollouts of a good transaction as JSON Lines, the first one changed."""
    for stage in BEFORE_SAMPLE:
        run(spec, stage)
    records = [
        rollout.to_json_object()
        for prompt in prompts_of(spec)
        for rollout in group_rollouts(prompt, ["Answer: 0", f"Answer: {prompt.ground_truth}"] * 2)
    ]
    records[0] |= changes
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": [float("nan")]}, "logprobs"),
        ({"logprobs": [None]}, "logprobs"),
        ({"logprobs": []}, "logprobs"),
        ({"token_ids": [], "logprobs": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"temperature": 0.0}, "temperature"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused_with_its_line_and_field(
    spec_fields: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    spec = make_spec(spec_fields)
    publish_rollout_bytes(spec, rollouts_with(spec, **changes))
    with pytest.raises(IntegrityError, match="sample/rollouts line 1") as caught:
        run(spec, "score_rewards")
    assert field in str(caught.value)


def test_a_missing_or_doubled_rollout_is_refused(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    content = rollouts_with(spec)
    publish_rollout_bytes(spec, content.split(b"\n", 1)[1])
    with pytest.raises(IntegrityError, match="3 of 4"):
        run(spec, "score_rewards")


def test_a_token_id_outside_the_vocabulary_is_refused_before_replay(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    publish_rollout_bytes(spec, rollouts_with(spec, token_ids=[100_000]))
    run(spec, "score_rewards")
    run(spec, "capture_prefix")
    with pytest.raises(DataRefused, match="100000"):
        run(spec, "old_logprobs")


def test_response_ids_that_no_text_encodes_to_travel_untouched(spec_fields: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    spec = make_spec(spec_fields)
    for stage in BEFORE_SAMPLE:
        run(spec, stage)
    tokenizer = AutoTokenizer.from_pretrained(spec.model.snapshot)
    split = [tokenizer.convert_tokens_to_ids(letter) for letter in "Answer"]
    assert tokenizer.encode(tokenizer.decode(split), add_special_tokens=False) != split
    rollouts = []
    for prompt in prompts_of(spec):
        group = group_rollouts(prompt, ["Answer: 0", f"Answer: {prompt.ground_truth}"] * 2)
        rollouts += [
            rollout.model_copy(update={"token_ids": tuple(split), "logprobs": (-3.0,) * len(split)})
            for rollout in group
        ]
    publish_rollouts(spec, rollouts)
    scored = run(spec, "score_rewards").receipt.predicate.outputs["scored_groups"]
    lines = open_store(spec.storage.uri).get_bytes(scored).splitlines()
    for line in lines:
        for rollout in ScoredGroup.model_validate_json(line).rollouts:
            assert list(rollout.token_ids) == split
    run(spec, "capture_prefix")
    logprobs = run(spec, "old_logprobs").receipt.predicate.outputs["logprobs"]
    first = json.loads(open_store(spec.storage.uri).get_bytes(logprobs).splitlines()[0])
    assert len(first["old_logprobs"]) == len(split)


def test_a_non_finite_loss_takes_no_step_and_publishes_nothing(
    spec_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from longstraw_core.training import update

    spec = make_spec(spec_fields)
    for stage in BEFORE_SAMPLE:
        run(spec, stage)
    publish_rollout_bytes(spec, rollouts_with(spec))
    for stage in ("score_rewards", "capture_prefix", "old_logprobs"):
        run(spec, stage)
    honest = update.response_loss
    monkeypatch.setattr(update, "response_loss", lambda *args, **kwargs: honest(*args, **kwargs) * float("nan"))
    with pytest.raises(NumericError, match="no optimizer step was taken"):
        run(spec, "train")
    assert not open_store(spec.storage.uri).exists("runs/small/0001/train/receipt.json")
    monkeypatch.undo()
    assert run(spec, "train").receipt.predicate.status == "stepped"


def test_a_transaction_has_one_parent_and_later_stages_take_it_from_the_first(
    spec_fields: dict[str, Any],
) -> None:
    first = make_spec(spec_fields)
    outcomes = run_transaction(first)
    parent = outcomes["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"]
    spec = make_spec(spec_fields, "name=second")
    run(spec, "audit_data", parent=parent)
    stranger = parent.model_copy(update={"digest": "sha256:" + "0" * 64})
    with pytest.raises(SpecError, match="one transaction has one parent"):
        run(spec, "export_lora", parent=stranger)
    exported = run(spec, "export_lora").receipt.predicate
    assert exported.status == "from_checkpoint"
    assert exported.inputs["external:parent_checkpoint"] == parent
    fresh = make_spec(spec_fields, "name=third")
    run(fresh, "audit_data")
    with pytest.raises(SpecError, match="a fresh adapter"):
        run(fresh, "export_lora", parent=parent)


def test_a_continued_run_reads_on_where_its_parent_stopped_whatever_the_transaction_size(
    spec_fields: dict[str, Any],
) -> None:
    first = make_spec(spec_fields, "data.prompts_per_transaction=3")
    parent = run_transaction(first)["manifest_checkpoint"].receipt.predicate.outputs["checkpoint_manifest"]
    used = {prompt.prompt_id for prompt in prompts_of(first)}
    second = make_spec(spec_fields, "name=second", "data.prompts_per_transaction=2")
    run(second, "audit_data", parent=parent)
    assert not used & {prompt.prompt_id for prompt in prompts_of(second)}


def test_a_data_file_that_changes_between_transactions_is_refused(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields)
    run_transaction(spec, 1)
    with Path(spec.data.path).open("a", encoding="utf-8") as rows:
        rows.write("\n")
    with pytest.raises(DataRefused, match="changed since"):
        run(spec, "audit_data", 2)


def test_positional_scaling_reaches_every_stage_and_every_receipt(spec_fields: dict[str, Any]) -> None:
    spec = make_spec(spec_fields, "model.rope_scaling={type: yarn, factor: 2.0, original_positions: 65536}")
    outcomes = run_transaction(spec, 1)
    assert {outcome.receipt.predicate.rope_scaling for outcome in outcomes.values()} == {spec.model.rope_scaling}
    assert spec.model.rope_scaling is not None

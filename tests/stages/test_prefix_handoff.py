"""From capture to use: states of the transaction before, how old they may be, and capturing again everywhere."""

from typing import Any

import pytest

from longstraw_core.artifacts import open_store, read_manifest
from longstraw_core.spec import TransactionSpec
from longstraw_core.stages.execute import StageOutcome
from tests.conftest import make_row
from tests.stages.scripted import make_spec, run_transaction


@pytest.fixture
def same_prompt(spec_fields: dict[str, Any], write_rows: Any) -> dict[str, Any]:
    """Every transaction reads the same single prompt."""
    write_rows([make_row(11)])
    spec_fields["data"]["prompts_per_transaction"] = 1
    return spec_fields


def captured(outcomes: dict[str, StageOutcome]) -> tuple[float, float]:
    metrics = outcomes["capture_prefix"].receipt.predicate.metrics
    return metrics["prefix/taken_over"], metrics["prefix/captured_tokens"]


def test_a_state_captured_without_the_adapter_is_used_again_after_a_step(same_prompt: dict[str, Any]) -> None:
    spec = make_spec(same_prompt, "objective.gradient=response_adapter")
    first, second = run_transaction(spec, 1), run_transaction(spec, 2)
    assert first["train"].receipt.predicate.status == "stepped"
    assert captured(first)[0] == 0
    assert captured(second) == (1, 0)
    assert files(spec, first) == files(spec, second)
    assert "prefix" not in second["train"].receipt.predicate.facts


@pytest.mark.parametrize("change", ["layout.page_tokens=8", "model.dtype=bfloat16"])
def test_a_state_of_another_specification_is_captured_again(same_prompt: dict[str, Any], change: str) -> None:
    run_transaction(make_spec(same_prompt, "objective.gradient=response_adapter"), 1)
    second = run_transaction(make_spec(same_prompt, "objective.gradient=response_adapter", change), 2)
    assert captured(second)[0] == 0
    assert second["train"].receipt.predicate.status == "stepped"


def test_after_a_step_other_modes_capture_again_unless_staleness_is_allowed(same_prompt: dict[str, Any]) -> None:
    spec = make_spec(same_prompt)
    first, second = run_transaction(spec, 1), run_transaction(spec, 2)
    assert captured(second)[0] == 0
    assert captured(second)[1] > 0
    assert files(spec, first) != files(spec, second)


def test_a_stale_state_is_used_as_far_as_allowed_and_receipts_say_how_stale_it_was(
    same_prompt: dict[str, Any],
) -> None:
    spec = make_spec(same_prompt, "prefix.max_stale_steps=1")
    first, second, third = (run_transaction(spec, number) for number in (1, 2, 3))
    assert captured(second) == (1, 0)
    for stage in ("capture_prefix", "old_logprobs", "train"):
        predicate = second[stage].receipt.predicate
        assert predicate.facts["prefix"] == "captured 1 optimizer step ago"
        assert predicate.metrics["prefix/stale_steps"] == 1
        assert "prefix" not in third[stage].receipt.predicate.facts
    assert files(spec, first) == files(spec, second)
    assert captured(third)[0] == 0, "two steps behind is more than allowed"


def test_without_a_step_a_state_is_used_again_in_every_mode(same_prompt: dict[str, Any]) -> None:
    spec = make_spec(same_prompt)
    first, second = run_transaction(spec, 1, right=0), run_transaction(spec, 2)
    assert first["train"].receipt.predicate.status == "no_signal"
    assert captured(second) == (1, 0)
    assert second["train"].receipt.predicate.status == "stepped"


def test_recapture_stores_no_state_and_gives_the_same_update(same_prompt: dict[str, Any], tmp_path: Any) -> None:
    stored = run_transaction(make_spec(same_prompt))
    again = make_spec(same_prompt | {"storage": {"uri": (tmp_path / "other").as_uri()}}, "prefix.handoff=recapture")
    outcomes = run_transaction(again)
    assert [path for path, _ in files(again, outcomes)] == ["0000/policy/prefix.json"]
    assert outcomes["capture_prefix"].receipt.predicate.status == "recapture"
    phases = {phase.name for phase in outcomes["train"].receipt.predicate.ranks[0].phases}
    assert "capture" in phases
    assert "restore" not in phases
    mine, theirs = (outcome["train"].receipt.predicate.metrics for outcome in (outcomes, stored))
    assert mine["grad_norm"] == theirs["grad_norm"]


def files(spec: TransactionSpec, outcomes: dict[str, StageOutcome]) -> list[tuple[str, str]]:
    """Paths and digests of the stored states, without the manifests' own."""
    tree = outcomes["capture_prefix"].receipt.predicate.outputs["prefix"]
    return [(entry.path, entry.digest) for entry in read_manifest(open_store(spec.storage.uri), tree).entries]


def test_staleness_counts_the_steps_of_the_same_model_prompt_and_mode_only() -> None:
    from longstraw_core.resident import PrefixIdentity
    from longstraw_core.resident.files import PrefixManifest
    from longstraw_core.spec import sha256_digest
    from longstraw_core.stages.prefix_handoff import stale_steps

    identity = PrefixIdentity(
        snapshot_digest=sha256_digest(b"model"),
        adapter_digest=sha256_digest(b"adapter"),
        prompt_digest=sha256_digest(b"prompt"),
        gradient="exact",
        reference=False,
    )
    stored = PrefixManifest(identity=identity, adapter_steps=4, prompt_token_ids=(1,), chunk_starts=(), shards=())
    now = identity.model_copy(update={"adapter_digest": sha256_digest(b"later")})
    assert stale_steps(stored, identity, 9, max_stale_steps=0) == 0
    assert stale_steps(stored, now, 5, max_stale_steps=0) is None
    assert stale_steps(stored, now, 5, max_stale_steps=1) == 1
    assert stale_steps(stored, now, 6, max_stale_steps=1) is None
    assert stale_steps(stored, now, 4, max_stale_steps=9) is None, "another adapter with the same number of steps"
    assert stale_steps(stored, now, 3, max_stale_steps=9) is None, "from the future"
    for field, value in (("snapshot_digest", sha256_digest(b"x")), ("gradient", "stopgrad"), ("reference", True)):
        assert stale_steps(stored, now.model_copy(update={field: value}), 5, max_stale_steps=9) is None

"""Runs stages in this process, with responses that a test wrote instead of the sampler."""

from collections.abc import Sequence
from typing import Any

from longstraw_core.artifacts import find_receipt, open_store, read_receipt, write_receipt
from longstraw_core.spec import Descriptor, Prompt, Rollout, TransactionSpec, canonical_json, sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON_LINES
from longstraw_core.spec.parse import parse_transaction_spec
from longstraw_core.spec.receipts import RankRecord, ReceiptPredicate
from longstraw_core.stages.execute import StageOutcome, StageRequest, run_stage
from longstraw_core.stages.source import source_digest

BEFORE_SAMPLE = ("audit_data", "export_lora")
AFTER_SAMPLE = ("score_rewards", "capture_prefix", "old_logprobs", "train", "manifest_checkpoint", "validate_run")


def make_spec(fields: dict[str, Any], *overrides: str) -> TransactionSpec:
    return parse_transaction_spec(canonical_json(fields), "test", overrides=overrides)


def run(
    spec: TransactionSpec,
    stage: str,
    transaction: int = 1,
    *,
    parent: Descriptor | None = None,
    ranks: int | None = None,
) -> StageOutcome:
    return run_stage(
        StageRequest(
            stage=stage,
            spec=spec,
            run=spec.name,
            transaction=transaction,
            parent_checkpoint=parent,
            context_parallel=ranks,
        )
    )


def prompts_of(spec: TransactionSpec, transaction: int = 1) -> list[Prompt]:
    store = open_store(spec.storage.uri)
    found = find_receipt(store, spec.name, transaction, "audit_data")
    assert found is not None
    content = store.get_bytes(read_receipt(store, found).predicate.outputs["prompts"])
    return [Prompt.model_validate_json(line) for line in content.splitlines()]


def publish_rollouts(spec: TransactionSpec, rollouts: Sequence[Rollout], transaction: int = 1) -> None:
    """Write the `sample` receipt as if the sampler had produced these rollouts."""
    store = open_store(spec.storage.uri)
    content = b"".join(canonical_json(rollout) + b"\n" for rollout in rollouts)
    publish_rollout_bytes(spec, content, transaction, store=store)


def publish_rollout_bytes(spec: TransactionSpec, content: bytes, transaction: int = 1, *, store: Any = None) -> None:
    store = store or open_store(spec.storage.uri)
    inputs = {}
    for stage in BEFORE_SAMPLE:
        receipt = find_receipt(store, spec.name, transaction, stage)
        assert receipt is not None
        inputs[f"receipt:{stage}"] = receipt
    write_receipt(
        store,
        ReceiptPredicate(
            stage="sample",
            run=spec.name,
            transaction=transaction,
            spec_digest=sha256_digest(canonical_json(spec)),
            source_digest=source_digest(),
            image_digest=None,
            gradient=spec.objective.gradient,
            seed=spec.seed,
            inputs=inputs,
            outputs={"rollouts": store.put_blob(content, MEDIA_TYPE_JSON_LINES)},
            context_parallel=1,
            expert_parallel=1,
            ranks=(RankRecord(rank=0, device="cpu", phases=()),),
            versions={},
            metrics={},
            status="ok",
        ),
    )


def group_rollouts(prompt: Prompt, answers: Sequence[str], finish: Sequence[str] | None = None) -> list[Rollout]:
    """Rollouts of one prompt whose texts are `answers`; token ids differ between them."""
    return [
        Rollout.model_validate(
            {
                "prompt_id": prompt.prompt_id,
                "index": index,
                "prompt_token_ids": prompt.token_ids,
                "token_ids": [5 + index, 9, 40 + 3 * index][: 1 + index % 3],
                "logprobs": [-6.0] * (1 + index % 3),
                "temperature": 1.0,
                "finish_reason": "stop" if finish is None else finish[index],
                "text": answer,
            }
        )
        for index, answer in enumerate(answers)
    ]


def run_transaction(
    spec: TransactionSpec,
    transaction: int = 1,
    *,
    right: int = 2,
    finish: Sequence[str] | None = None,
    parent: Descriptor | None = None,
    ranks: dict[str, int] | None = None,
) -> dict[str, StageOutcome]:
    """Run one whole transaction in which `right` responses of every group are correct.

    Args:
        spec: as a user gives it.
        transaction: counted from 1.
        right: correct responses of every group.
        finish: why each response of a group ended.
        parent: manifest of the checkpoint to start from; for the first transaction.
        ranks: on how many ranks a stage runs, where that is not what the layout says.
    """
    outcomes = {"audit_data": run(spec, "audit_data", transaction, parent=parent)}
    outcomes["export_lora"] = run(spec, "export_lora", transaction)
    rollouts: list[Rollout] = []
    for prompt in prompts_of(spec, transaction):
        size = spec.sampling.group_size
        answers = [f"Answer: {prompt.ground_truth}"] * right + ["Answer: 0"] * (size - right)
        rollouts += group_rollouts(prompt, answers, finish)
    publish_rollouts(spec, rollouts, transaction)
    for stage in AFTER_SAMPLE:
        outcomes[stage] = run(spec, stage, transaction, ranks=(ranks or {}).get(stage))
    return outcomes

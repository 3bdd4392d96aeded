"""Runs one stage: inputs are verified, finished work is reused, outputs come first and the receipt last."""

import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from longstraw_core.artifacts.finished_work import clear_finished_work
from longstraw_core.artifacts.outputs import check_receipt_outputs
from longstraw_core.artifacts.receipts import find_receipt, read_receipt, receipt_name, write_receipt
from longstraw_core.artifacts.store import Store, open_store
from longstraw_core.spec import (
    Descriptor,
    IntegrityError,
    SpecError,
    StageReceipt,
    TransactionSpec,
    canonical_json,
    sha256_digest,
)
from longstraw_core.spec.model import FiniteFloat, StrictModel
from longstraw_core.spec.receipts import Phase, RankRecord, ReceiptPredicate, StageName
from longstraw_core.stages.catalogue import StageEntry, stage_entry
from longstraw_core.stages.context import PARENT_INPUT, StageContext, StageResult
from longstraw_core.stages.events import EventLog, peak_memory_bytes
from longstraw_core.stages.source import image_digest, source_digest, versions

QUIET_AND_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Defaults of the libraries' own switches: no download at run time, no bars and repeated advice in stage logs."""


@dataclass(frozen=True)
class StageRequest:
    """Which stage to run, of which transaction of which run."""

    stage: str
    spec: TransactionSpec
    run: str
    transaction: int
    parent_checkpoint: Descriptor | None = None
    context_parallel: int | None = None
    """Ranks of this execution instead of the specification's."""
    expected_receipts: dict[StageName, str] = field(default_factory=dict)
    """Digests of upstream receipts as the caller received them; read from the store when absent."""

    @property
    def ranks(self) -> int:
        """Context-parallel ranks of this execution, where the stage runs on ranks."""
        return self.context_parallel or self.spec.layout.context_parallel


@dataclass(frozen=True)
class StageOutcome:
    """A finished stage: its receipt and whether it was already there."""

    receipt: StageReceipt
    descriptor: Descriptor
    reused: bool
    store: Store


def set_library_defaults() -> None:
    """Set the libraries' switches of which the environment says nothing."""
    for variable, value in QUIET_AND_OFFLINE.items():
        os.environ.setdefault(variable, value)


def parse_parent_checkpoint(text: str) -> Descriptor | None:
    """Read the parameter `parent_checkpoint`: empty, or the descriptor of a checkpoint manifest as JSON."""
    if not text.strip():
        return None
    try:
        return Descriptor.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "value"
        raise SpecError(
            f"parent_checkpoint: {place}: {problem['msg']}; pass the descriptor that manifest_checkpoint printed"
        ) from error


def run_stage(request: StageRequest) -> StageOutcome:
    """Run one stage, or verify and reuse what an earlier execution of it published.

    Raises:
        SpecError: unknown stage, or the stage was already run with another specification or other inputs.
        IntegrityError: an input or an earlier output is not what its digest says.
        DataRefused, NumericError, Retryable: what the stage itself reports.
    """
    entry = stage_entry(request.stage)
    if request.transaction < 1:
        raise SpecError(f"transaction: {request.transaction} must be 1 or more")
    log = EventLog(entry.name, request.run, request.transaction)
    started = time.monotonic()
    log.emit("stage_started", gradient=request.spec.objective.gradient)
    store = open_store(request.spec.storage.uri, create=not entry.upstream)
    receipts, receipt_inputs = upstream_receipts(store, request, entry)
    earlier = _earlier_execution(store, request, entry, receipt_inputs)
    if earlier is not None:
        outcome = StageOutcome(earlier[0], earlier[1], reused=True, store=store)
    else:
        store.keys.check_can_write()
        predicate = _execute(store, request, entry, receipts, receipt_inputs, log)
        descriptor = write_receipt(store, predicate)
        outcome = StageOutcome(read_receipt(store, descriptor), descriptor, reused=False, store=store)
    clear_finished_work(store, request.run, request.transaction, entry.name)
    predicate = outcome.receipt.predicate
    log.emit(
        "stage_finished",
        status=predicate.status,
        reused=outcome.reused,
        seconds=round(time.monotonic() - started, 3),
        peak_memory_bytes=max(
            [peak_memory_bytes()] + [phase.peak_memory_bytes for rank in predicate.ranks for phase in rank.phases]
        ),
        gradient=predicate.gradient,
        receipt=outcome.descriptor.digest,
        metrics=predicate.metrics,
    )
    return outcome


def finished_stage(request: StageRequest) -> StageOutcome | None:
    """The verified outcome of an earlier execution of exactly this request, None when there is none yet.

    Raises:
        SpecError: it was already run with another specification or other inputs, or an upstream receipt is absent.
        IntegrityError: an input or an output is not what its digest says.
    """
    entry = stage_entry(request.stage)
    store = open_store(request.spec.storage.uri)
    _, receipt_inputs = upstream_receipts(store, request, entry)
    earlier = _earlier_execution(store, request, entry, receipt_inputs)
    return None if earlier is None else StageOutcome(earlier[0], earlier[1], reused=True, store=store)


def upstream_receipts(
    store: Store, request: StageRequest, entry: StageEntry
) -> tuple[dict[StageName, StageReceipt], dict[str, Descriptor]]:
    """Read and verify the receipts of the stages before this one; also returns them as receipt inputs.

    Raises:
        SpecError: a stage before has not finished, or ran with another specification.
        IntegrityError: a receipt is not the one that the caller was handed.
    """
    receipts: dict[StageName, StageReceipt] = {}
    inputs: dict[str, Descriptor] = {}
    spec_digest = sha256_digest(canonical_json(request.spec))
    for upstream in entry.upstream:
        name = receipt_name(request.run, request.transaction, upstream)
        descriptor = find_receipt(store, request.run, request.transaction, upstream)
        if descriptor is None:
            raise SpecError(
                f"{entry.name} needs the receipt of {upstream}, and {name} is not in {store.uri}; run {upstream} first"
            )
        expected = request.expected_receipts.get(upstream, descriptor.digest)
        if expected != descriptor.digest:
            raise IntegrityError(f"{name}: expected {expected}, observed {descriptor.digest}; do not use it")
        receipt = read_receipt(store, descriptor)
        if receipt.predicate.spec_digest != spec_digest:
            raise SpecError(
                f"{upstream} was run with another specification ({receipt.predicate.spec_digest}, "
                f"this one is {spec_digest}); use one specification for the whole run"
            )
        receipts[upstream] = receipt
        inputs[f"receipt:{upstream}"] = descriptor
    return receipts, inputs


def _earlier_execution(
    store: Store, request: StageRequest, entry: StageEntry, receipt_inputs: dict[str, Descriptor]
) -> tuple[StageReceipt, Descriptor] | None:
    descriptor = find_receipt(store, request.run, request.transaction, entry.name)
    if descriptor is None:
        return None
    receipt = read_receipt(store, descriptor)
    predicate = receipt.predicate
    wanted = {
        "specification": (predicate.spec_digest, sha256_digest(canonical_json(request.spec))),
        "code": (predicate.source_digest, source_digest()),
        "parent checkpoint": (
            predicate.inputs.get(PARENT_INPUT),
            request.parent_checkpoint
            if entry.name == "audit_data" and request.transaction == 1
            else predicate.inputs.get(PARENT_INPUT),
        ),
        "inputs": (
            {key: value for key, value in predicate.inputs.items() if key.startswith("receipt:")},
            receipt_inputs,
        ),
    }
    for what, (found, expected) in wanted.items():
        if found != expected:
            raise SpecError(
                f"{descriptor.uri}: {entry.name} was already run in this run with another {what}; "
                "start a new run under another name"
            )
    check_receipt_outputs(store, receipt)
    return receipt, descriptor


def _execute(
    store: Store,
    request: StageRequest,
    entry: StageEntry,
    receipts: dict[StageName, StageReceipt],
    receipt_inputs: dict[str, Descriptor],
    log: EventLog,
) -> ReceiptPredicate:
    set_library_defaults()
    layout = request.spec.layout
    if request.context_parallel is not None and request.context_parallel % layout.expert_parallel:
        raise SpecError(
            f"{request.context_parallel} ranks: layout.expert_parallel {layout.expert_parallel} does not divide them; "
            "experts are sharded over the same ranks as tokens"
        )
    size = request.ranks if entry.ranked else 1
    with tempfile.TemporaryDirectory(prefix="longstraw-") as scratch:
        if size == 1:
            context = StageContext(
                stage=entry.name,
                spec=request.spec,
                run=request.run,
                transaction=request.transaction,
                store=store,
                scratch=Path(scratch),
                log=log,
                receipts=receipts,
                parent_checkpoint=request.parent_checkpoint if "parent checkpoint" in entry.external else None,
                inputs=dict(receipt_inputs),
            )
            result = execute_here(context)
        else:
            from longstraw_core.stages.ranked import execute_on_ranks, ranked_request

            result = execute_on_ranks(ranked_request(request, receipt_inputs, scratch))
    if not set(entry.outputs) <= set(result.outputs) <= {*entry.outputs, *entry.optional_outputs}:
        raise AssertionError(f"{entry.name} published {sorted(result.outputs)}, the catalogue says {entry.outputs}")
    return ReceiptPredicate(
        stage=entry.name,
        run=request.run,
        transaction=request.transaction,
        spec_digest=sha256_digest(canonical_json(request.spec)),
        source_digest=source_digest(),
        image_digest=image_digest(),
        gradient=request.spec.objective.gradient,
        rope_scaling=request.spec.model.rope_scaling,
        seed=request.spec.seed,
        inputs=result.inputs,
        outputs=result.outputs,
        context_parallel=size,
        expert_parallel=layout.expert_parallel if size > 1 else 1,
        ranks=result.ranks,
        versions=versions(),
        metrics=result.metrics,
        status=result.status,
        facts=result.facts,
    )


class ExecutedStage(StrictModel):
    """What the processes of one execution say together."""

    outputs: dict[str, Descriptor]
    metrics: dict[str, FiniteFloat]
    status: str
    facts: dict[str, str]
    inputs: dict[str, Descriptor]
    ranks: tuple[RankRecord, ...]


def execute_here(context: StageContext) -> ExecutedStage:
    """Execute the stage in this process; its record is the only one in `ranks`."""
    module = importlib.import_module(f"longstraw_core.stages.{context.stage}")
    execute: Callable[[StageContext], StageResult] = module.execute
    started = time.monotonic()
    result = execute(context)
    accounted = sum(phase.seconds for phase in context.phases)
    context.phases.append(
        Phase(
            name="imports and the rest",
            seconds=max(0.0, time.monotonic() - started - accounted),
            peak_memory_bytes=peak_memory_bytes(),
        )
    )
    rank, device = (0, "cpu") if context.joined is None else (context.joined.rank, str(context.joined.device))
    return ExecutedStage(
        outputs=result.outputs,
        metrics=result.metrics,
        status=result.status,
        facts=result.facts,
        inputs=context.inputs,
        ranks=(RankRecord(rank=rank, device=device, phases=tuple(context.phases)),),
    )


def spec_from_parameter(text: str) -> TransactionSpec:
    """Read the pipeline parameter `spec`: one specification as a JSON string."""
    from longstraw_core.spec.parse import parse_transaction_spec

    try:
        json.loads(text)
    except ValueError as error:
        raise SpecError(f"parameter spec: not JSON: {error}") from error
    return parse_transaction_spec(text, "parameter spec")

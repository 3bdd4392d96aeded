"""A stage on several ranks: what its launcher sends, what every rank does with it, and what comes back."""

import json
import socket
from pathlib import Path

from longstraw_core.artifacts.receipts import read_receipt
from longstraw_core.artifacts.store import open_store
from longstraw_core.spec import Descriptor, TransactionSpec, canonical_json
from longstraw_core.spec.errors import StageFailed
from longstraw_core.spec.model import PositiveCount, StrictModel
from longstraw_core.spec.receipts import StageName, StageReceipt
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.context import StageContext
from longstraw_core.stages.events import EventLog
from longstraw_core.stages.execute import ExecutedStage, StageRequest, execute_here
from longstraw_core.training.launch import run_ranks
from longstraw_core.training.process_groups import Ranks, available_device
from longstraw_core.training.rank_task import RankTask


class RankedRequest(StrictModel):
    """One execution of a stage on ranks."""

    stage: StageName
    spec: TransactionSpec
    run: str
    transaction: PositiveCount
    context_parallel: PositiveCount
    expert_parallel: PositiveCount
    parent_checkpoint: Descriptor | None
    inputs: dict[str, Descriptor]
    """Receipts of the stages before, which the launcher has verified."""
    scratch: str
    """Directory of this host for this execution."""


def ranked_request(request: StageRequest, inputs: dict[str, Descriptor], scratch: str) -> RankedRequest:
    """What the ranks of this host are told; every host of the stage tells its own the same."""
    return RankedRequest(
        stage=stage_entry(request.stage).name,
        spec=request.spec,
        run=request.run,
        transaction=request.transaction,
        context_parallel=request.ranks,
        expert_parallel=request.spec.layout.expert_parallel,
        parent_checkpoint=request.parent_checkpoint,
        inputs=inputs,
        scratch=scratch,
    )


def execute_on_ranks(request: RankedRequest) -> ExecutedStage:
    """Launch this host's ranks and return what the ranks of all hosts say together.

    Raises:
        LongStrawError: what the failing rank reported; nothing is published then.
    """
    task = RankTask(
        entry=f"{__name__}:execute_rank",
        request=canonical_json(request).decode("utf-8"),
        context_parallel=request.context_parallel,
        expert_parallel=request.expert_parallel,
        device=available_device(),
        host=socket.gethostname(),
        timeout_seconds=float(request.spec.layout.rank_timeout_seconds),
    )
    for result in run_ranks(task, Path(request.scratch) / "ranks"):
        if result is not None:
            return ExecutedStage.model_validate_json(result)
    raise StageFailed(f"{request.stage}: no rank returned a result")


def execute_rank(request: bytes, ranks: Ranks) -> bytes:
    """Execute the stage on one rank; every rank returns the record of all."""
    asked = RankedRequest.model_validate_json(request)
    entry = stage_entry(asked.stage)
    store = open_store(asked.spec.storage.uri, create=False)
    receipts: dict[StageName, StageReceipt] = {}
    for upstream in entry.upstream:
        receipts[upstream] = read_receipt(store, asked.inputs[f"receipt:{upstream}"])
    context = StageContext(
        stage=entry.name,
        spec=asked.spec,
        run=asked.run,
        transaction=asked.transaction,
        store=store,
        scratch=Path(asked.scratch),
        log=EventLog(entry.name, asked.run, asked.transaction, silent=ranks.rank != 0),
        receipts=receipts,
        parent_checkpoint=asked.parent_checkpoint if "parent checkpoint" in entry.external else None,
        inputs=dict(asked.inputs),
        joined=ranks,
    )
    mine = execute_here(context)
    records = [json.loads(item) for item in ranks.gather(canonical_json(mine.ranks[0]))]
    # What is published is rank 0's; the others return an empty result.
    leader = ExecutedStage.model_validate_json(ranks.gather(canonical_json(mine))[0])
    together = leader.model_dump(mode="json") | {"ranks": records}
    return canonical_json(ExecutedStage.model_validate_json(json.dumps(together)))

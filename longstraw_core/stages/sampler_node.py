"""What runs on the nodes above 0 while `sample` runs on node 0: one rank of the server, until rank 0 is gone.

It writes nothing to the store: the stage, its artifacts and its receipt are node 0's.
"""

import tempfile
from pathlib import Path

from longstraw_core.artifacts.receipts import find_receipt
from longstraw_core.artifacts.store import open_store
from longstraw_core.rollout.node_places import DEFAULT_HTTP_PORT, DEFAULT_RENDEZVOUS_PORT
from longstraw_core.rollout.server_command import NodePlace
from longstraw_core.rollout.sglang_server import follow_leader
from longstraw_core.spec import SpecError
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.context import StageContext
from longstraw_core.stages.events import EventLog
from longstraw_core.stages.execute import StageRequest, upstream_receipts
from longstraw_core.stages.sample_with_server import served_policy


def run_sampler_node(request: StageRequest, *, rank: int, leader: str) -> None:
    """Verify model and adapter as the stage does, start rank `rank`, and return when rank 0 has ended.

    Args:
        request: the same run and transaction as node 0's stage `sample`.
        rank: from 1 to `sampling.server.nodes` − 1.
        leader: host name or address of node 0.

    Raises:
        SpecError: the specification has no such rank, or a stage before has not finished.
        IntegrityError: model or adapter are not what was published.
        StageFailed: this rank ended while rank 0 still answers, or rank 0 never answered.
    """
    server = request.spec.sampling.server
    if request.spec.sampling.engine != "sglang" or not 1 <= rank < server.nodes:
        raise SpecError(
            f"rank {rank}: sampling.engine is {request.spec.sampling.engine} on {server.nodes} nodes; another node "
            "has a rank from 1 to sampling.server.nodes - 1"
        )
    entry = stage_entry("sample")
    log = EventLog(f"sample rank {rank}", request.run, request.transaction)
    store = open_store(request.spec.storage.uri)
    receipts, inputs = upstream_receipts(store, request, entry)

    def is_over() -> bool:
        return find_receipt(store, request.run, request.transaction, entry.name) is not None

    if is_over():  # node 0 finds it too and starts no server
        log.emit("already_finished")
        return
    place = NodePlace(
        rank=rank,
        leader=leader,
        http_port=server.port or DEFAULT_HTTP_PORT,
        rendezvous_port=server.rendezvous_port or DEFAULT_RENDEZVOUS_PORT,
    )
    with tempfile.TemporaryDirectory(prefix="longstraw-") as scratch:
        context = StageContext(
            stage="sample",
            spec=request.spec,
            run=request.run,
            transaction=request.transaction,
            store=store,
            scratch=Path(scratch),
            log=log,
            receipts=receipts,
            inputs=inputs,
        )
        policy = served_policy(context)
        log.emit("following", leader=leader)
        follow_leader(
            policy,
            server,
            place,
            seed=request.spec.seed,
            logs=Path(scratch) / "server-logs",
            progress=log.progress,
            is_over=is_over,
        )
        log.emit("leader_gone")

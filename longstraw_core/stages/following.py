"""What the nodes above 0 of a stage do: they compute with node 0 and publish no result, no receipt, no state of work.

Blobs that a rank of another host wrote (its part of the prompt's state) go to the store from there; the tree that
names them, and the receipt that names the tree, are node 0's.
"""

import tempfile

from longstraw_core.artifacts.store import open_store
from longstraw_core.spec import SpecError
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.events import EventLog
from longstraw_core.stages.execute import StageRequest, finished_stage, set_library_defaults, upstream_receipts


def follow_stage(request: StageRequest, *, node: int, leader: str) -> None:
    """Run this node's processes of a stage and return when they have ended well.

    Args:
        request: the request that node 0 runs.
        node: number of this node, from 1.
        leader: host name or address of node 0.

    Raises:
        SpecError: the stage runs on one node, or a stage before has not finished.
        LongStrawError: what a process of this node reported.
    """
    entry = stage_entry(request.stage)
    set_library_defaults()
    if entry.name == "sample":
        from longstraw_core.stages.sampler_node import run_sampler_node

        run_sampler_node(request, rank=node, leader=leader)
        return
    if not entry.ranked:
        raise SpecError(f"node {node} of {entry.name}: this stage runs in one pod")
    log = EventLog(f"{entry.name} node {node}", request.run, request.transaction)
    if finished_stage(request) is not None:  # node 0 finds the same receipt and starts no ranks
        log.emit("already_finished")
        return
    from longstraw_core.stages.ranked import execute_on_ranks, ranked_request

    log.emit("following", leader=leader)
    _, inputs = upstream_receipts(open_store(request.spec.storage.uri), request, entry)
    with tempfile.TemporaryDirectory(prefix="longstraw-") as scratch:
        execute_on_ranks(ranked_request(request, inputs, scratch))
    log.emit("ranks_ended")

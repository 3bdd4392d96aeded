"""The stage on one node of several: reads the request from the store and runs it; started by `stages.node`.

Node 0 runs the stage and writes its receipt, the others take part (`stages.following`).
"""

import os
import sys

from pydantic import ValidationError

from longstraw_core.artifacts.store import open_store
from longstraw_core.spec import Descriptor, SpecError
from longstraw_core.stages.execute import run_stage
from longstraw_core.stages.failure import report_stage_failure
from longstraw_core.stages.following import follow_stage
from longstraw_core.stages.work_request import WorkRequest, read_request

STORE_VARIABLE = "LONGSTRAW_STORE"
REQUEST_VARIABLE = "LONGSTRAW_REQUEST"
NODE_VARIABLE, LEADER_VARIABLE = "LONGSTRAW_NODE_RANK", "LONGSTRAW_NODE_LEADER"


def main() -> int:
    """Run the stage that the environment names; return the documented exit code."""
    request: WorkRequest | None = None
    try:
        request = requested()
        node, leader = this_node()
        if node == 0:
            run_stage(request.to_stage_request())
        else:
            follow_stage(request.to_stage_request(), node=node, leader=leader)
    except BaseException as error:
        place = ("worker", "unknown", 0) if request is None else (request.stage, request.run, request.transaction)
        return report_stage_failure(*place, error)
    return 0


def this_node() -> tuple[int, str]:
    """Read this node's number and the host name of node 0.

    Raises:
        SpecError: the number is missing or none, or a node above 0 is told no leader.
    """
    number, leader = os.environ.get(NODE_VARIABLE, ""), os.environ.get(LEADER_VARIABLE, "")
    if not number.isdecimal() or (int(number) and not leader):
        raise SpecError(
            f"{NODE_VARIABLE}={number!r} with {LEADER_VARIABLE}={leader!r}: there must be a number, and above 0 a "
            "leader; this program is started by the launcher's pods"
        )
    return int(number), leader


def requested() -> WorkRequest:
    """Read the request whose descriptor is in the environment.

    Raises:
        SpecError: a variable is missing or is no descriptor.
        IntegrityError: the request is not what its digest says.
    """
    try:
        descriptor = Descriptor.model_validate_json(os.environ[REQUEST_VARIABLE])
        store = open_store(os.environ[STORE_VARIABLE])
    except KeyError as error:
        raise SpecError(f"{error.args[0]} is not set; this program is started by the launcher's pods") from error
    except ValidationError as error:
        raise SpecError(
            f"{REQUEST_VARIABLE} is not a descriptor: {error.errors(include_url=False)[0]['msg']}"
        ) from error
    return read_request(store, descriptor)


if __name__ == "__main__":
    sys.exit(main())

"""The stage on one node of several: reads the request from the store and runs it; started by `stages.node`."""

import os
import sys

from pydantic import ValidationError

from longstraw_core.artifacts.store import open_store
from longstraw_core.spec import Descriptor, SpecError
from longstraw_core.stages.execute import run_stage
from longstraw_core.stages.failure import report_stage_failure
from longstraw_core.stages.work_request import WorkRequest, read_request

STORE_VARIABLE = "LONGSTRAW_STORE"
REQUEST_VARIABLE = "LONGSTRAW_REQUEST"


def main() -> int:
    """Run the stage that the environment names; return the documented exit code."""
    request: WorkRequest | None = None
    try:
        request = requested()
        run_stage(request.to_stage_request())
    except BaseException as error:
        place = ("worker", "unknown", 0) if request is None else (request.stage, request.run, request.transaction)
        return report_stage_failure(*place, error)
    return 0


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

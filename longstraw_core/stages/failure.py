"""What happens when a stage fails: one line for people, one event for programs, one exit code."""

import sys
import traceback

from longstraw_core.spec import LongStrawError, StageFailed
from longstraw_core.spec.exit_codes import exit_code
from longstraw_core.stages.events import EventLog


def report_stage_failure(stage: str, run: str, transaction: int, error: BaseException) -> int:
    """Emit `stage_failed` and return the exit code; unexpected errors also leave their traceback on standard error."""
    if isinstance(error, LongStrawError):
        kind, message = type(error), str(error)
        for known in (*type(error).__mro__,):
            if known in LongStrawError.__subclasses__():
                kind = known
                break
    else:
        traceback.print_exception(error, file=sys.stderr)
        kind, message = StageFailed, f"{stage}: {type(error).__name__}: {error}"
    code = exit_code(error)
    EventLog(stage, run, transaction).emit("stage_failed", error=kind.__name__, exit_code=code, message=message)
    return code

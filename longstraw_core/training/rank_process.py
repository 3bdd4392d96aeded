"""The process of one rank, as torchrun starts it: join the others, run the task, report how it ended."""

import ctypes
import errno
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError

from longstraw_core.artifacts.files import storage_error
from longstraw_core.spec.errors import LongStrawError, StageFailed
from longstraw_core.spec.exit_codes import error_name, exit_code
from longstraw_core.training.heartbeat import Heartbeat
from longstraw_core.training.process_groups import join_ranks, leave_ranks
from longstraw_core.training.rank_task import RankFailure, read_task, write_failure, write_result

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the task in the directory named by the only argument; never returns."""
    directory = Path(sys.argv[1])
    warnings.simplefilter("ignore", FutureWarning)  # advice to developers, once per rank
    warnings.filterwarnings("ignore", module=r"megatron\.")
    rank = int(os.environ["RANK"])
    _end_with_launcher()
    heartbeat = Heartbeat(directory, rank)
    code = 0
    try:
        task = read_task(directory)
        module, _, name = task.entry.partition(":")
        heartbeat.enter("join")
        ranks = join_ranks(
            task.context_parallel,
            task.expert_parallel,
            device=task.device,
            host=task.host,
            timeout_seconds=task.timeout_seconds,
            heartbeat=heartbeat,
        )
        result = getattr(importlib.import_module(module), name)(task.request.encode("utf-8"), ranks)
        if result is not None:
            write_result(directory, rank, result)
        heartbeat.enter("leave")
        leave_ranks(ranks)
    except BaseException as error:
        code = _report(directory, rank, heartbeat.phase, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Communication threads of a broken group may never end by themselves.
    os._exit(code)


def _end_with_launcher() -> None:
    """Be killed when the launcher dies, even when stopped or in the middle of a call that no thread interrupts.

    prctl(2), PR_SET_PDEATHSIG. A launcher that died before is noticed by the heartbeat.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _report(directory: Path, rank: int, phase: str, error: BaseException) -> int:
    lost = is_lost_rank(error)
    if isinstance(error, LongStrawError):
        name, message = error_name(error), str(error)
    elif is_disk_full(error):
        full = storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), f"in phase {phase}: {_writing(error)}")
        name, message = error_name(full), str(full)
    elif is_out_of_memory(error):
        name = StageFailed.__name__
        message = (
            f"out of memory in phase {phase}: {_first_line(error)}; lower layout.prompt_chunk_tokens, "
            "set layout.checkpoint_layers or use more ranks"
        )
    else:
        name, message = StageFailed.__name__, f"in phase {phase}: {type(error).__name__}: {_first_line(error)}"
        if not lost and not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error, file=sys.stderr)
    write_failure(
        directory,
        RankFailure(rank=rank, error=name, message=message, phase=phase, lost_another=lost, time=time.time()),
    )
    return exit_code(error)


def is_lost_rank(error: BaseException) -> bool:
    """Whether the error says that another rank is gone or silent, and nothing about this one."""
    if isinstance(error, torch.distributed.DistError | ConnectionError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("connection closed by peer", "timed out waiting", "connection reset", "gloo")
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is a failed allocation, on a GPU or on the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether the error says that a file system or a quota is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, SafetensorError | RuntimeError) and os.strerror(errno.ENOSPC) in str(error)


def _writing(error: BaseException) -> str:
    """What could not be written; an error of a write itself names no file."""
    if not isinstance(error, OSError):
        return _first_line(error)
    return f"writing {error.filename or f'temporary files below {tempfile.gettempdir()}'}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


if __name__ == "__main__":
    main()

"""Runs a function on several real processes that form a gloo process group, for tests of distributed code.

The first failing rank's traceback is the test's failure; a hang ends after a bound, with every rank's stack. Starting a
rank costs seconds of imports, so one run should serve many cases: let the function write results to files and let tests
read them.
"""

import faulthandler
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0
"""How long the other ranks may live after one has failed."""
START_SECONDS = 90.0
"""How long a rank may take to start: importing torch on a busy machine."""


class RankFailed(AssertionError):
    """A rank raised, died or did not come to an end."""


def run_on_ranks(
    count: int, function: Callable[..., None], *arguments: Any, directory: Path, seconds: float = 240.0
) -> None:
    """Call `function(rank, *arguments)` on ranks 0 … count - 1, with the default process group initialised.

    Args:
        count: number of processes.
        function: importable by name in a new process.
        directory: where ranks rendezvous and leave their messages; new for every run.
        seconds: bound of the function, without the start of its process.

    Raises:
        RankFailed: with the traceback of the rank that failed first, or all stacks after a hang.
    """
    directory.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, count, str(directory), seconds, function, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        failed = _first_failure(processes, time.monotonic() + START_SECONDS + seconds)
    finally:
        _end(processes)
    if failed is not None:
        codes = [process.exitcode for process in processes]
        messages = sorted(directory.glob("rank-*.failure"), key=lambda path: path.stat().st_mtime_ns)
        stacks = sorted(directory.glob("rank-*.stack"))
        text = "\n".join(path.read_text() for path in (messages[:1] or stacks)).strip()
        raise RankFailed(f"rank {failed} failed, exit codes {codes}\n{text or 'no message: it was killed'}")


def _first_failure(processes: list[BaseProcess], deadline: float) -> int | None:
    """Wait until all ranks are done or one has failed; return that one."""
    while time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if process.exitcode not in (None, 0):
                return rank
        if all(process.exitcode == 0 for process in processes):
            return None
        time.sleep(0.02)
    return next(rank for rank, process in enumerate(processes) if process.exitcode != 0)


def _end(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not any(process.exitcode not in (None, 0) for process in processes):
            break
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _rank(
    rank: int, count: int, directory: str, seconds: float, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    folder = Path(directory)
    with (folder / f"rank-{rank}.stack").open("w") as stack:
        stack.write(f"rank {rank} did not end within {seconds} s:\n")
        stack.flush()
        faulthandler.dump_traceback_later(seconds, exit=True, file=stack)
        try:
            import torch
            import torch.distributed

            torch.set_num_threads(1)
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=seconds),
            )
            function(rank, *arguments)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        except BaseException:
            (folder / f"rank-{rank}.failure").write_text(f"rank {rank}:\n{traceback.format_exc()}")
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()

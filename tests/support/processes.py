"""What a test's own process has started, by psutil: another way to look than the product's own."""

import contextlib
import os

import psutil


def descendants() -> list[psutil.Process]:
    """Every living process below this one."""
    return psutil.Process(os.getpid()).children(recursive=True)


def still_living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run on; a process that only waits to be reaped holds nothing."""
    found: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found

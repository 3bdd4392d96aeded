"""SIGTERM as an exception in the main thread, and as nothing while what was created is being given back."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM: the pod of this launcher is being ended."""


@contextmanager
def terminated_by_signal() -> Generator[None, None, None]:
    """Turn SIGTERM into `Terminated` in the main thread; elsewhere, signals are the caller's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)  # one is enough, and the next would interrupt the deletion
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def signals_ignored() -> Generator[None, None, None]:
    """Roll back once, whatever else is sent meanwhile; SIGKILL ends it, and then the other layers clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

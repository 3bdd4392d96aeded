"""One rank of an SGLang server as a child process: started in a session of its own, watched, stopped, gone.

The server ends with exit code 137 whatever went wrong, so the reason is read from its log.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from longstraw_core.rollout import die_with_parent
from longstraw_core.rollout.process_session import kill_session, wait_for_end
from longstraw_core.spec import SpecError, StageFailed

PYTHON_VARIABLE = "LONGSTRAW_SGLANG_PYTHON"
"""Interpreter of the environment that has SGLang; without it this process's own."""
PYTHON_PATH_VARIABLE = "LONGSTRAW_SGLANG_PYTHONPATH"
"""PYTHONPATH of the server; without it none, because ours belongs to another environment."""

_NOT_INHERITED = re.compile(r"AWS_.*|LONGSTRAW_.*|PYTHON.*|VIRTUAL_ENV|KFP_.*")
"""Credentials, and what steers this interpreter."""
_REASON = re.compile(r"[A-Za-z.]*(Error|Exception|error)\b.*:|Killed|out of memory|Capture.*failed")
_QUIET = re.compile(r"Ignore import error|UserWarning|FutureWarning|DeprecationWarning")
TAIL_BYTES = 65536


def server_python() -> str:
    """Return the interpreter that has SGLang.

    Raises:
        SpecError: the variable names no executable file.
    """
    configured = os.environ.get(PYTHON_VARIABLE)
    if configured is None:
        return sys.executable
    if not os.access(configured, os.X_OK):
        raise SpecError(f"{PYTHON_VARIABLE}={configured}: not an executable file; name the Python that has sglang")
    return configured


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: this one without credentials and without what steers our interpreter."""
    kept = {name: value for name, value in environment.items() if _NOT_INHERITED.fullmatch(name) is None}
    kept |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # A crashed server would wait a minute for core dumps that nobody keeps, with its requests unanswered meanwhile.
    kept.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    if PYTHON_PATH_VARIABLE in environment:
        kept["PYTHONPATH"] = environment[PYTHON_PATH_VARIABLE]
    return kept


class ServerProcess:
    """A started rank: it ends with the thread that started it, and is gone when `wait_until_gone` returns."""

    def __init__(self, command: Sequence[str], log: Path, *, rank: int) -> None:
        """Start the rank.

        Raises:
            SpecError: the interpreter is no executable file.
        """
        program = shutil.which(command[0])
        if program is None:
            raise SpecError(f"{command[0]} cannot be started: no executable file; set {PYTHON_VARIABLE}")
        self.rank = rank
        self.log = log
        with log.open("wb") as output:
            # From here until the guard runs, the kernel ends the rank if this process is killed.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=server_environment(os.environ),
                start_new_session=True,
            )
        self.session = self._process.pid
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "longstraw_core.rollout.server_guard", str(self.session)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        """Exit code of the launched process, None while it runs."""
        return self._process.poll()

    def check_alive(self, doing: str) -> None:
        """Raise StageFailed with the log's reason when the process has ended; `doing` is what it was needed for."""
        code = self.exit_code()
        if code is not None:
            raise StageFailed(
                f"SGLang rank {self.rank} ended (exit code {code}) while {doing}; its log ends with: {self.tail()}"
            )

    def interrupt(self) -> None:
        """Ask the server to end; it finishes no requests."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait_until_gone(self, grace_seconds: float) -> None:
        """Wait for the end of every process of this rank, and kill what lives after `grace_seconds`.

        Raises:
            StageFailed: something survives even that, so its memory is still taken.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        gone = wait_for_end(self.session, 1.0) or kill_session(self.session)
        self._process.poll()
        if not gone:
            raise StageFailed(
                f"SGLang rank {self.rank}: processes of session {self.session} survive SIGKILL; their memory is taken"
            )
        self._release_guard()

    def _release_guard(self) -> None:
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(b"\n")
                self._guard.stdin.close()
        self._guard.wait()

    def has_said(self, pattern: re.Pattern[str]) -> bool:
        """Whether the end of the log has what `pattern` describes."""
        try:
            return pattern.search(_end_of(self.log)) is not None
        except OSError:
            return False

    def tail(self) -> str:
        """The log's last reasons and lines, as one line."""
        return log_tail(self.log)


def log_tail(log: Path) -> str:
    """Last lines of a log that state a reason, and its very last, joined by ` | `."""
    try:
        text = _end_of(log)
    except OSError as error:
        return f"(no log: {error})"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _QUIET.search(line)]
    reasons = [number for number, line in enumerate(lines) if _REASON.search(line)]
    shown = sorted({*reasons[-4:], *range(max(0, len(lines) - 3), len(lines))})
    return " | ".join(_printable(lines[number])[:400] for number in shown) or "(an empty log)"


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)

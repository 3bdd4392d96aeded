"""Becomes another program that ends when its parent does: `python -I -S die_with_parent.py PARENT COMMAND...`.

A guard watches over a server, but between the server's start and the guard's the stage may be killed. Linux signals a
process whose parent ended (prctl(2), PR_SET_PDEATHSIG); the setting survives exec and is not inherited by children. It
imports nothing of this package, so that it is in force a few milliseconds after the fork.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Set the signal and become `command`; returns only when `parent` has ended or `command` cannot be started."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        print(f"OSError: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 1
    if os.getppid() != parent:  # it ended before the setting was in force
        print("the stage ended before its server was started", file=sys.stderr)
        return 1
    try:
        os.execv(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"OSError: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

"""The program that ends a server whose stage died: `python -m longstraw_core.rollout.server_guard SESSION`.

The stage holds the other end of standard input. It writes a byte when it has stopped the server itself; when the pipe
ends without one, the stage was killed, and a server that nobody stops would keep its GPUs.
"""

import signal
import sys

from longstraw_core.rollout.process_session import kill_session, session_processes, signal_session, wait_for_end

GRACE_SECONDS = 20.0


def main(session: int) -> int:
    """Wait for the stage, then end what is left of the server's session."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stdin.buffer.read(1) or not session_processes(session):
        return 0
    signal_session(session, signal.SIGTERM)
    if not wait_for_end(session, GRACE_SECONDS):
        kill_session(session)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

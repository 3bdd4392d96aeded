"""Free loopback ports, and waiting until a server answers on one."""

import socket
import time
from contextlib import closing


def free_port(*, also_plus: int = 0) -> int:
    """A port that nobody listens on now; with `also_plus` the port that much higher is free too."""
    while True:
        with closing(socket.socket()) as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            if not also_plus:
                return port
            if port + also_plus > 65535:
                continue
            with closing(socket.socket()) as second:
                try:
                    second.bind(("127.0.0.1", port + also_plus))
                except OSError:
                    continue
                return port


def listens(port: int) -> bool:
    """Whether something accepts connections on a loopback port."""
    with closing(socket.socket()) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until_listening(port: int, *, seconds: float = 30.0) -> None:
    """Wait until a loopback port accepts connections; raise TimeoutError when it does not."""
    deadline = time.monotonic() + seconds
    while not listens(port):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on 127.0.0.1:{port}")
        time.sleep(0.05)

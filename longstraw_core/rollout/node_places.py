"""Where the ranks of a server stand: the machines and ports of one transaction's sampling.

Where one machine runs all ranks, free ports are chosen for them. A rank binds its port only after it has imported and
loaded everything, so the ports come from below the range that the kernel gives to outgoing connections and to listeners
that ask for any port, and from a random place in it, so that two servers that start together do not meet.
"""

import os
import random
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from longstraw_core.rollout.server_command import NodePlace
from longstraw_core.spec import Retryable, SpecError
from longstraw_core.spec.transaction import ServerSpec

RANK_VARIABLE = "LONGSTRAW_NODE_RANK"
"""Number of this node among `sampling.server.nodes`; absent where one machine runs them all."""
LEADER_VARIABLE = "LONGSTRAW_NODE_LEADER"
"""Host name or address of the node of rank 0, as the others reach it."""
DEFAULT_HTTP_PORT = 30000
DEFAULT_RENDEZVOUS_PORT = 20000
RENDEZVOUS_PORTS = 12
"""The server uses this many ports from the rendezvous port on."""

PORTS = range(10000, 20000)
"""Where free ports are looked for: SGLang itself takes some between 22000 and 29999."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOOKS = 200


def node_places(server: ServerSpec) -> list[NodePlace]:
    """Where the ranks that this machine runs stand: all of them, or the one that the environment names.

    Raises:
        SpecError: the environment's rank is no rank of the server, or has no leader.
        Retryable: no ports are free.
    """
    stated = os.environ.get(RANK_VARIABLE)
    if stated is None:
        first = free_ports(server.nodes + RENDEZVOUS_PORTS)
        meet = server.rendezvous_port or first + server.nodes
        http = [server.port or first, *range(first + 1, first + server.nodes)]
        return [NodePlace(rank=rank, http_port=port, rendezvous_port=meet) for rank, port in enumerate(http)]
    leader = os.environ.get(LEADER_VARIABLE, "")
    if not stated.isdecimal() or int(stated) >= server.nodes or not leader:
        raise SpecError(
            f"{RANK_VARIABLE}={stated!r} with {LEADER_VARIABLE}={leader!r}: there must be a leader and a rank below "
            f"sampling.server.nodes ({server.nodes})"
        )
    return [
        NodePlace(
            rank=int(stated),
            leader=leader,
            http_port=server.port or DEFAULT_HTTP_PORT,
            rendezvous_port=server.rendezvous_port or DEFAULT_RENDEZVOUS_PORT,
            host="0.0.0.0",  # noqa: S104 - the other nodes watch this port
        )
    ]


def may_move(server: ServerSpec) -> bool:
    """Whether other ports could be chosen: one machine runs all ranks, and the specification states none."""
    return RANK_VARIABLE not in os.environ and server.port is None and server.rendezvous_port is None


def free_ports(count: int) -> int:
    """Return the first of `count` successive loopback ports that are free now.

    Raises:
        Retryable: none were found.
    """
    chosen = random.SystemRandom()
    for _ in range(_LOOKS):
        first = chosen.choice(_candidates(count))
        if all(is_free("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise Retryable(f"no {count} successive ports are free on this machine; run again")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on a port now."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _candidates(count: int) -> Sequence[int]:
    """First ports of blocks outside the kernel's own range, which may have been set to begin lower than usual."""
    try:
        lowest, highest = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        lowest, highest = 32768, 60999
    outside = [first for first in PORTS[:-count] if first + count <= lowest or first > highest]
    return outside or PORTS[:-count]

"""A TCP proxy in front of an S3 server that misbehaves on demand: cuts, truncates, flips a byte, answers 503."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


def _refusal(status: bytes, code: bytes) -> bytes:
    body = b'<?xml version="1.0"?><Error><Code>' + code + b"</Code><Message>no</Message></Error>"
    head = b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + body


REFUSALS = {
    "slow_down": _refusal(b"503 Slow Down", b"SlowDown"),
    "forbidden": _refusal(b"403 Forbidden", b"AccessDenied"),
}


@dataclass
class Fault:
    """One way to misbehave, a number of times, on requests whose first line a test chooses."""

    kind: str
    """`cut_answer`, `flip_answer`, `truncate_answer`, `cut_request`, `flip_request`, `slow_down`, `forbidden`,
    `lose_answer`, where the server did what it was asked, or, which never answers, `silent`."""
    times: int
    matches: Callable[[bytes], bool] = lambda line: True
    after_bytes: int = 1000
    """How many body bytes pass unharmed first."""
    hits: int = 0


@dataclass
class FaultProxy:
    """Where the proxy listens and what it does to the next requests."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    """First line of every request that arrived."""
    heads: list[bytes] = field(default_factory=list)
    """The same with all headers."""
    stripped: tuple[bytes, ...] = ()
    """Headers, in lower case, that no request arrives with; only for servers that check no signatures."""
    on_request: Callable[[bytes], None] | None = None
    """Called with the first line before a request is passed on."""

    def take(self, line: bytes) -> Fault | None:
        """The fault for a request, counted as used."""
        for fault in self.faults:
            if fault.hits < fault.times and fault.matches(line):
                fault.hits += 1
                return fault
        return None


@contextmanager
def fault_proxy(target: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultProxy]:
    """Run a proxy in front of `target` (an `http://` URL); with `tls` it speaks HTTPS to its clients."""
    parts = urlsplit(target)
    upstream = (str(parts.hostname), int(parts.port or 80))
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = FaultProxy(f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}")

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if tls is not None:
                try:
                    client = tls.wrap_socket(client, server_side=True)
                except OSError:  # the client does not trust the certificate
                    continue
            threading.Thread(target=_serve, args=(client, upstream, proxy), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield proxy
    finally:
        listener.close()


def _serve(client: socket.socket, upstream: tuple[str, int], proxy: FaultProxy) -> None:
    """Pass requests of one connection, one after the other."""
    with client, suppress(OSError, EOFError), socket.create_connection(upstream) as server:
        reader, answers = client.makefile("rb"), server.makefile("rb")
        while True:
            head = _head(reader)
            line = head.partition(b"\r\n")[0]
            proxy.requests.append(line)
            proxy.heads.append(head)
            if proxy.on_request is not None:
                proxy.on_request(line)
            fault = proxy.take(line)
            kind = fault.kind if fault else ""
            if kind in REFUSALS or kind == "silent":
                _drain(reader, _length(head))
                if kind == "silent":
                    reader.read(1)  # until the client gives up
                else:
                    client.sendall(REFUSALS[kind])
                return
            head = _without(head, proxy.stripped)
            if b"expect: 100-continue" in head.lower():
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                head = b"\r\n".join(part for part in head.split(b"\r\n") if not part.lower().startswith(b"expect:"))
            server.sendall(head)
            if not _pass(reader, server, _length(head), fault, request=True):
                return
            answer = _head(answers)
            while answer.startswith(b"HTTP/1.1 100"):
                answer = _head(answers)
            if kind == "lose_answer":
                return
            length = 0 if line.startswith(b"HEAD") else _length(answer)
            client.sendall(answer)
            if not _pass(answers, client, length, fault, request=False):
                return


def _pass(source, target: socket.socket, length: int, fault: Fault | None, *, request: bool) -> bool:
    """Pass a body on, harmed as the fault says; False when the connection must end."""
    side = "_request" if request else "_answer"
    active = fault is not None and fault.kind.endswith(side) and length > 0
    limit = min(fault.after_bytes, length - 1) if fault is not None else 0
    sent = 0
    while sent < length:
        chunk = source.read1(min(1 << 16, length - sent))
        if not chunk:
            return False
        if active and fault is not None and sent <= limit < sent + len(chunk):
            place = limit - sent
            if fault.kind.startswith("flip"):
                chunk = chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]
            else:
                target.sendall(chunk[:place])
                if fault.kind.startswith("cut"):
                    target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
                return False
        target.sendall(chunk)
        sent += len(chunk)
    return True


def _head(reader) -> bytes:
    lines: list[bytes] = []
    while (line := reader.readline()) != b"\r\n":
        if not line:
            raise EOFError
        lines.append(line)
    return b"".join(lines) + b"\r\n"


def _without(head: bytes, names: tuple[bytes, ...]) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if line.partition(b":")[0].lower() not in names)


def _length(head: bytes) -> int:
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        raise EOFError("chunked bodies are not passed")
    for line in lowered.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _drain(reader, length: int) -> None:
    while length > 0:
        chunk = reader.read(min(1 << 16, length))
        if not chunk:
            return
        length -= len(chunk)

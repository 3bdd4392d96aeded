"""A TCP proxy before an API server: outage, dropped connections and delay, the same for the fake and the real one."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy:
    """Forwards bytes both ways; `refuse` cuts everything off, `drop` cuts once, `delay` holds every request back."""

    def __init__(self, target: tuple[str, int], port: int = 0) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.refusing = False
        self.delay = 0.0
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Nothing is answered, and what was connected is cut."""
        self.refuse()
        try:
            yield
        finally:
            self.refusing = False

    def refuse(self) -> None:
        self.refusing = True
        self.drop()

    def drop(self) -> None:
        """Cut every connection that is open now."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.refusing = True
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, request: bool) -> None:
        try:
            while data := source.recv(65536):
                if request and self.delay:
                    time.sleep(self.delay)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for connection in (source, sink):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.discard(source)
            source.close()

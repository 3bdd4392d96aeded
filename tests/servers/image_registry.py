"""An OCI registry on loopback that knows some digests, asks for an anonymous token, and refuses everything else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ImageRegistry:
    """What the registry serves; tests set it and read `asked`."""

    images: dict[str, str] = field(default_factory=dict)
    """repository@digest that is asked for → digest that is served."""
    needs_token: bool = False
    gives_tokens: bool = True
    asked: list[str] = field(default_factory=list)
    host: str = ""


@contextmanager
def image_registry() -> Iterator[ImageRegistry]:
    """Serve an empty registry."""
    state = ImageRegistry()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Tests read `asked` instead."""

        def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path.startswith("/token?") and state.gives_tokens:
                self._answer(200, b'{"token": "anonymous"}')
            else:
                self._answer(403)

        def do_HEAD(self) -> None:
            state.asked.append(self.path)
            if state.needs_token and self.headers.get("Authorization") != "Bearer anonymous":
                realm = f'Bearer realm="http://{state.host}/token",service="r",scope="repository:x:pull"'
                return self._answer(401, WWW_Authenticate=realm)
            _, _, rest = self.path.partition("/v2/")
            repository, _, digest = rest.partition("/manifests/")
            served = state.images.get(f"{repository}@{digest}")
            if served is None or "application/vnd.oci.image.index.v1+json" not in self.headers.get("Accept", ""):
                return self._answer(404)
            return self._answer(200, Docker_Content_Digest=served)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.host = f"127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()

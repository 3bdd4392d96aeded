"""What a server may answer instead of a reply: each ends in one line that names the response."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longstraw_core.rollout.sglang_client import ConnectionLost, SglangClient
from longstraw_core.spec import StageFailed
from tests.support.sglang.oracle import prompt_of, wanted


class Scripted(BaseHTTPRequestHandler):
    """Answers every request with the same bytes, and may announce more than it sends."""

    status: int
    content: bytes
    announced: int

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(self.announced))
        self.end_headers()
        self.wfile.write(self.content)

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Scripted,), {})) as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def client_of(server: ThreadingHTTPServer, status: int, content: bytes, *, missing: int = 0) -> SglangClient:
    handler = server.RequestHandlerClass
    handler.status, handler.content, handler.announced = status, content, len(content) + missing  # type: ignore[attr-defined]
    return SglangClient(f"http://127.0.0.1:{server.server_port}")


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (200, b"<html>proxy</html>", "the server's reply is not JSON"),
        (200, b"", "the server's reply is not JSON"),
        (200, b'{"text": "\xff"}', "the server's reply is not JSON"),
        (200, b"[" * 200_000, "the server's reply is not JSON"),
        (200, b'{"output_ids": [' + b"9" * 5000 + b"]}", "the server's reply is not JSON"),
        (200, b"[1, 2]", "the server's reply has no meta_info"),
        (302, b"", "refused with HTTP 302"),
        (400, b'{"error": {"message": "too\\nlong"}}', "refused with HTTP 400: too long$"),
        (400, b'{"error": "\\u001b[31mred"}', r"refused with HTTP 400: \[31mred$"),
        (500, b"[" * 200_000, "refused with HTTP 500: "),
        (502, b"<html>" + b"bad gateway\n" * 500, "refused with HTTP 502: <html>bad gateway bad"),
    ],
)
def test_what_is_no_reply_is_refused_in_one_short_line(
    server: ThreadingHTTPServer, status: int, content: bytes, message: str
) -> None:
    with pytest.raises(StageFailed, match=message) as caught:
        client_of(server, status, content).sample(wanted(prompt_of(5)), timeout_seconds=10.0)
    assert str(caught.value).startswith("response p0[0]: ")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_a_reply_that_breaks_off_is_a_lost_connection(server: ThreadingHTTPServer) -> None:
    with pytest.raises(ConnectionLost, match=r"response p0\[0\]: the connection to .* was lost: ProtocolError"):
        client_of(server, 200, b'{"output_ids": [1', missing=100).sample(wanted(prompt_of(5)), timeout_seconds=10.0)


def test_another_kind_of_server_has_no_server_information(server: ThreadingHTTPServer) -> None:
    with pytest.raises(StageFailed, match="answers with no JSON object; it is no SGLang server"):
        client_of(server, 200, b"[1, 2]").server_info()

"""HTTP to one SGLang server (0.5.23): health, one response, abort. Knows nothing of how the server was started."""

import json
import threading
import uuid
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError

from longstraw_core.rollout.reply import Wanted, read_reply, request_body
from longstraw_core.spec import Rollout, StageFailed

ABORT_GRACE_SECONDS = 30.0
"""How long an aborted request may take to hand over what it has."""
HEALTH_SECONDS = 30.0


class ConnectionLost(StageFailed):
    """The server went away, or never answered; whoever started it knows more."""


class SglangClient:
    """One server; may be used by many threads at once."""

    def __init__(self, url: str, *, connections: int = 1) -> None:
        self.url = url.rstrip("/")
        # No repetition: a response that is asked for twice is not the response of its seed and place in the batch.
        self._pool = urllib3.PoolManager(num_pools=4, maxsize=connections, retries=False, block=False)

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()

    def healthy(self) -> bool:
        """Whether the server answers a one-token request of its own right now."""
        try:
            response = self._pool.request(
                "GET", f"{self.url}/health_generate", timeout=urllib3.Timeout(connect=5.0, read=HEALTH_SECONDS)
            )
        except HTTPError:
            return False
        return response.status == 200

    def server_info(self) -> dict[str, Any]:
        """The server's own settings.

        Raises:
            ConnectionLost, StageFailed: it does not answer, or with something else.
        """
        info = self._json("GET", "/server_info", None, HEALTH_SECONDS, "server information")
        if not isinstance(info, dict):
            raise StageFailed(f"server information: {self.url} answers with no JSON object; it is no SGLang server")
        return info

    def sample(self, wanted: Wanted, *, timeout_seconds: float) -> Rollout:
        """Sample one response; after `timeout_seconds` it is aborted, and what was sampled until then is returned.

        Raises:
            ConnectionLost: the server went away.
            StageFailed, NumericError: it refused the request, or its reply does not fit (see `read_reply`).
        """
        request_id = uuid.uuid4().hex
        body = request_body(wanted, request_id)
        aborter = _Deadline(self, request_id, timeout_seconds)
        try:
            reply = self._json("POST", "/generate", body, timeout_seconds + ABORT_GRACE_SECONDS, wanted.name)
        finally:
            aborter.cancel()
        return read_reply(wanted, reply)

    def abort(self, request_id: str | None) -> None:
        """Abort one request, or all; a server that does not answer has nothing to abort."""
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        try:
            self._pool.request(
                "POST",
                f"{self.url}/abort_request",
                body=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                timeout=urllib3.Timeout(connect=5.0, read=10.0),
            )
        except HTTPError:
            return

    def _json(self, method: str, path: str, body: Any, seconds: float, what: str) -> Any:
        try:
            response = self._pool.request(
                method,
                f"{self.url}{path}",
                body=None if body is None else json.dumps(body, allow_nan=False).encode(),
                headers={"Content-Type": "application/json"},
                timeout=urllib3.Timeout(connect=10.0, read=seconds),
            )
        except ReadTimeoutError as error:
            raise StageFailed(
                f"{what}: no reply from {self.url} within {seconds:.0f} s, not even to an abort"
            ) from error
        except HTTPError as error:
            raise ConnectionLost(f"{what}: the connection to {self.url} was lost: {type(error).__name__}") from error
        if response.status != 200:
            raise StageFailed(
                f"{what}: the server refused with HTTP {response.status}: {_error_message(response.data)}"
            )
        try:
            return json.loads(response.data)
        except (ValueError, RecursionError) as error:
            raise StageFailed(f"{what}: the server's reply is not JSON: {error}") from error


class _Deadline:
    """Aborts a request when its time is up."""

    def __init__(self, client: SglangClient, request_id: str, seconds: float) -> None:
        self._timer = threading.Timer(seconds, client.abort, [request_id])
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()


def _error_message(data: bytes) -> str:
    try:
        content = json.loads(data)
        error = content.get("error", content)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        text = data.decode("utf-8", errors="replace")
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())[:400]

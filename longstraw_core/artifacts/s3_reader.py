"""Reads one S3 object as a stream: ranged parts in parallel, in order, of one and the same version; hashes nothing."""

import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError  # pyright: ignore[reportMissingTypeStubs]
from urllib3.exceptions import HTTPError

from longstraw_core.artifacts.s3_answers import code_of, is_missing, is_taken
from longstraw_core.artifacts.s3_connection import (
    PARALLEL_PARTS,
    TOTAL_ATTEMPTS,
    Connection,
    pause,
)
from longstraw_core.spec.errors import IntegrityError, Retryable, SpecError

READ_PART_BYTES = 16 << 20

Result = TypeVar("Result")

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class _Version:
    """Which object the first answer was of; every further part must be of the same."""

    size: int
    etag: str
    version: str | None


class S3Reader:
    """The bytes of one object in order, while later parts are already on their way.

    Memory is bounded by the connection's buffers: a reader waits for one only while it holds none, so readers that
    share a connection cannot wait for each other in a circle.
    """

    def __init__(self, connection: Connection, key: str) -> None:
        """Read the first part.

        Raises:
            FileNotFoundError: there is no such object.
        """
        self._connection = connection
        self._key = key
        self._position = 0
        self._waiting: deque[Future[bytes]] = deque()
        connection.buffers.acquire()
        self._permits = 1
        """Parts in memory or on their way: `_part`, and one per entry of `_waiting`."""
        try:
            self._version, self._part = self._first()
        except BaseException:
            self._release_all()
            raise
        self._requested = len(self._part)

    @property
    def size(self) -> int:
        """Length of the object as the server states it."""
        return self._version.size

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes (all that are left when negative); fewer only at the end of the object."""
        pieces: list[bytes] = []
        wanted = size
        while wanted != 0:
            if self._position == len(self._part) and not self._next():
                break
            piece = self._part[self._position :] if wanted < 0 else self._part[self._position : self._position + wanted]
            self._position += len(piece)
            wanted -= len(piece) if wanted > 0 else 0
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Forget parts that are still on their way."""
        for future in self._waiting:
            future.cancel()
        for future in self._waiting:
            if not future.cancelled():
                future.exception()  # waits: its memory must be free before the permit is
        self._waiting.clear()
        self._part, self._position = b"", 0
        self._requested = self.size
        self._release_all()

    def _next(self) -> bool:
        """Take the next part; False at the end of the object."""
        self._part, self._position = b"", 0
        if self._permits > len(self._waiting):
            self._permits -= 1
            self._connection.buffers.release()
        while self._requested < self.size and len(self._waiting) < PARALLEL_PARTS:
            if not self._connection.buffers.acquire(blocking=self._permits == 0):
                break
            self._permits += 1
            start = self._requested
            self._requested = min(start + READ_PART_BYTES, self.size)
            self._waiting.append(self._connection.pool.submit(self._range, start, self._requested - start))
        if not self._waiting:
            return False
        self._part = self._waiting[0].result()
        self._waiting.popleft()
        return True

    def _release_all(self) -> None:
        while self._permits:
            self._permits -= 1
            self._connection.buffers.release()

    def _first(self) -> tuple[_Version, bytes]:
        request: dict[str, Any] = {"Range": f"bytes=0-{READ_PART_BYTES - 1}"}

        def attempt() -> tuple[_Version, bytes]:
            try:
                response = self._get(request)
            except ClientError as error:
                if is_missing(error):
                    raise FileNotFoundError(self._key) from error
                if code_of(error) == "InvalidRange":  # an empty object has no byte 0
                    return self._empty()
                raise self._connection.typed(error, f"reading {self._key}") from error
            stated = _CONTENT_RANGE.fullmatch(str(response.get("ContentRange", "")))
            length = response.get("ContentLength")  # absent where a proxy sends the body in chunks
            if stated is None and (length is None or length > READ_PART_BYTES):
                response["Body"].close()
                raise SpecError(f"reading {self._key}: {self._connection.shown} ignores ranges; use another server")
            size = int(stated[3]) if stated else int(length or 0)
            content = _body(response, min(size, READ_PART_BYTES))
            return _Version(size, str(response.get("ETag", "")), response.get("VersionId")), content

        return self._repeated(attempt)

    def _empty(self) -> tuple[_Version, bytes]:
        with self._connection.reporting(f"reading {self._key}"):
            head = self._connection.client.head_object(Bucket=self._connection.bucket, Key=self._key)
        if head["ContentLength"] != 0:
            raise self._replaced()
        return _Version(0, "", None), b""

    def _range(self, start: int, length: int) -> bytes:
        """One later part, of the version that the first part was of."""
        end = start + length - 1
        request: dict[str, Any] = {"Range": f"bytes={start}-{end}", "IfMatch": self._version.etag}
        if self._version.version not in (None, "null"):
            request["VersionId"] = self._version.version

        def attempt() -> bytes:
            try:
                response = self._get(request)
            except ClientError as error:
                if is_taken(error) or is_missing(error) or code_of(error) in ("InvalidRange", "NoSuchVersion"):
                    raise self._replaced() from error
                raise self._connection.typed(error, f"reading {self._key}") from error
            stated = str(response.get("ContentRange", ""))
            if stated != f"bytes {start}-{end}/{self.size}" or response.get("ETag") != self._version.etag:
                response["Body"].close()
                raise self._replaced()
            return _body(response, length)

        return self._repeated(attempt)

    def _get(self, request: dict[str, Any]) -> dict[str, Any]:
        """One GET request; boto3 repeats it itself until its headers arrive."""
        with self._connection.reporting_transport(f"reading {self._key}"):
            return self._connection.client.get_object(Bucket=self._connection.bucket, Key=self._key, **request)

    def _repeated(self, attempt: Callable[[], Result]) -> Result:
        """Repeat while bodies break off, with backoff."""
        for number in range(TOTAL_ATTEMPTS):
            try:
                return attempt()
            except _BrokenBody as error:
                if number == TOTAL_ATTEMPTS - 1:
                    raise Retryable(
                        f"reading {self._key}: {self._connection.shown}: the connection breaks off every time "
                        f"({error}); check the network, then run again"
                    ) from error
            pause(number)
        raise AssertionError("unreachable")

    def _replaced(self) -> IntegrityError:
        return IntegrityError(
            f"{self._key} was replaced in {self._connection.shown} while it was read; artifacts never change: do not "
            "use it"
        )


class _BrokenBody(Exception):
    """A body ended early or its connection broke."""


def _body(response: dict[str, Any], length: int) -> bytes:
    body = response["Body"]
    try:
        content: bytes = body.read()
    except (BotoCoreError, HTTPError, OSError) as error:
        raise _BrokenBody(type(error).__name__) from error
    finally:
        body.close()
    if len(content) != length:
        raise _BrokenBody(f"{len(content)} of {length} bytes arrived")
    return content

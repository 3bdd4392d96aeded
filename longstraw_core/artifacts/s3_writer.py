"""Uploads one blob to S3: checked by the server with SHA-256, created only once, continued where a kill left it."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from botocore.exceptions import ClientError  # pyright: ignore[reportMissingTypeStubs]

from longstraw_core.artifacts.files import CHUNK_BYTES, Measured
from longstraw_core.artifacts.s3_answers import is_gone_upload, is_taken
from longstraw_core.artifacts.s3_conditions import base64_of
from longstraw_core.artifacts.s3_connection import Connection, pages
from longstraw_core.spec.errors import IntegrityError, Retryable, SpecError

SMALL_PART_BYTES = 16 << 20
MAX_PART_BYTES = 64 << 20
MAX_PARTS = 10_000
"""S3's limit."""


class Source(Protocol):
    """Bytes of known length that can be read again from any place."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, fewer only when the source shrank."""
        ...


@dataclass(frozen=True, slots=True)
class BytesSource:
    """Bytes in memory."""

    content: bytes

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.content)

    def read_at(self, offset: int, length: int) -> bytes:
        """A slice."""
        return self.content[offset : offset + length]


@dataclass(frozen=True, slots=True)
class FileSource:
    """An open regular file."""

    opened: int
    path: Path
    size: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Read without moving the file's position, so that parts can be read at once."""
        pieces: list[bytes] = []
        while length and (piece := os.pread(self.opened, length, offset)):
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be uploaded: the digest of the whole and of each part, from one reading."""

    measured: Measured
    part_bytes: int
    parts: tuple[bytes, ...]
    """Raw SHA-256 of every part; at least one."""

    @property
    def checksum(self) -> str:
        """The SHA-256 as S3 states it for the finished object: of the whole, or composite with the number of parts."""
        if len(self.parts) == 1:
            return base64_of(self.parts[0])
        return f"{base64_of(hashlib.sha256(b''.join(self.parts)).digest())}-{len(self.parts)}"


def part_size(size: int) -> int:
    """Bytes per part of an object; depends on its size only, so that an interrupted upload continues.

    Raises:
        SpecError: the object is too large for S3 with parts that fit into memory.
    """
    part = SMALL_PART_BYTES
    while part * MAX_PARTS < size:
        part *= 2
    if part > MAX_PART_BYTES:
        raise SpecError(f"{size} bytes in one file are more than {MAX_PARTS * MAX_PART_BYTES}; split the file")
    return part


def make_plan(source: Source) -> Plan:
    """Read a source once and return the digests of the whole and of its parts."""
    part_bytes = part_size(source.size)
    whole = hashlib.sha256()
    parts: list[bytes] = []
    size = 0
    for start in range(0, max(source.size, 1), part_bytes):
        part = hashlib.sha256()
        end = min(start + part_bytes, source.size)
        for offset in range(start, end, CHUNK_BYTES):
            chunk = source.read_at(offset, min(CHUNK_BYTES, end - offset))
            size += len(chunk)
            whole.update(chunk)
            if source.size > part_bytes:
                part.update(chunk)
        parts.append(part.digest() if source.size > part_bytes else whole.digest())
    if size != source.size:
        raise _changed(source)
    return Plan(Measured(size=size, digest="sha256:" + whole.hexdigest()), part_bytes, tuple(parts))


def put_parts(connection: Connection, key: str, source: Source, plan: Plan, media_type: str) -> bool:
    """Create an object from parts, continuing an upload that was interrupted; False when the object exists already.

    Raises:
        UploadGone: somebody else completed or aborted the upload meanwhile; look whether the object exists now.
        Retryable: the source changed while it was read.
    """
    upload = _open_upload(connection, key)
    finished: dict[int, str] = {}
    if upload is None:
        with connection.reporting(f"storing {key}"):
            upload = str(
                connection.client.create_multipart_upload(
                    Bucket=connection.bucket, Key=key, ContentType=media_type, ChecksumAlgorithm="SHA256"
                )["UploadId"]
            )
    else:
        finished = _parts_that_match(connection, key, upload, source, plan)
    missing = [number for number in range(1, len(plan.parts) + 1) if number not in finished]
    finished.update(_send_parts(connection, key, upload, source, plan, missing))
    return _complete(connection, key, upload, plan, finished)


class UploadGone(Exception):
    """A multipart upload ended under our hands."""


def _send_parts(
    connection: Connection, key: str, upload: str, source: Source, plan: Plan, numbers: Sequence[int]
) -> dict[int, str]:
    """Upload parts in parallel; return their ETags. Memory is bounded by the connection's buffers.

    That a part is what was planned is for the server to find, which states the SHA-256 it compared with; only where it
    states none are the bytes hashed here once more.
    """

    def send(number: int) -> str:
        planned = plan.parts[number - 1]
        attempts = 0

        def check(content: bytes) -> None:
            if hashlib.sha256(content).digest() != planned:
                raise _changed(source)

        def request(content: bytes) -> dict[str, Any]:
            nonlocal attempts
            if attempts:  # the server may have refused bytes that changed since they were planned
                check(content)
            attempts += 1
            client = connection.part_client if connection.compares.is_set() else connection.client
            return client.upload_part(
                Bucket=connection.bucket,
                Key=key,
                UploadId=upload,
                PartNumber=number,
                Body=content,
                ChecksumSHA256=base64_of(planned),
            )

        try:
            content = source.read_at((number - 1) * plan.part_bytes, plan.part_bytes)
            answer = connection.sent(f"storing part {number} of {key}", lambda: request(content))
            if answer.get("ChecksumSHA256") == base64_of(planned):
                connection.compares.set()
            else:
                check(content)
            return str(answer["ETag"])
        finally:
            connection.buffers.release()

    futures: list[tuple[int, Future[str]]] = []
    try:
        for number in numbers:
            connection.buffers.acquire()
            futures.append((number, connection.pool.submit(send, number)))
            if futures[0][1].done():
                futures[0][1].result()  # fail early
        return {number: future.result() for number, future in futures}
    except ClientError as error:
        if is_gone_upload(error):
            raise UploadGone from error
        raise connection.typed(error, f"storing {key}") from error
    finally:
        for _, future in futures:
            if future.cancel():
                connection.buffers.release()
        for _, future in futures:
            if not future.cancelled():
                future.exception()


def _complete(connection: Connection, key: str, upload: str, plan: Plan, etags: dict[int, str]) -> bool:
    parts = [
        {"PartNumber": number, "ETag": etags[number], "ChecksumSHA256": base64_of(digest)}
        for number, digest in enumerate(plan.parts, start=1)
    ]
    identity = {"Bucket": connection.bucket, "Key": key, "UploadId": upload}
    try:
        answer = connection.sent(
            f"completing {key}",
            lambda: connection.client.complete_multipart_upload(
                **identity, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            ),
        )
    except ClientError as error:
        if is_gone_upload(error):
            raise UploadGone from error
        if is_taken(error):
            abort_upload(connection, key, upload)
            return False
        raise connection.typed(error, f"completing {key}") from error
    stated = answer.get("ChecksumSHA256")
    if stated and "-" in stated and stated != plan.checksum:
        raise IntegrityError(
            f"{key}: the server put it together as {stated}, expected {plan.checksum}; delete it and run again"
        )
    return True


def abort_upload(connection: Connection, key: str, upload: str) -> None:
    """Give up a multipart upload; one that is gone already is no error."""
    try:
        connection.client.abort_multipart_upload(Bucket=connection.bucket, Key=key, UploadId=upload)
    except ClientError as error:
        if not is_gone_upload(error):
            raise connection.typed(error, f"aborting the upload of {key}") from error


def _open_upload(connection: Connection, key: str) -> str | None:
    """The newest unfinished upload of exactly this key."""
    found: list[tuple[Any, str]] = []
    with connection.reporting(f"looking for interrupted uploads of {key}"):
        for page in pages(
            connection.client.list_multipart_uploads,
            (("KeyMarker", "NextKeyMarker"), ("UploadIdMarker", "NextUploadIdMarker")),
            Bucket=connection.bucket,
            Prefix=key,
        ):
            found += [(item["Initiated"], item["UploadId"]) for item in page.get("Uploads", []) if item["Key"] == key]
    return max(found)[1] if found else None


def _parts_that_match(connection: Connection, key: str, upload: str, source: Source, plan: Plan) -> dict[int, str]:
    """ETags of the uploaded parts that certainly hold our bytes.

    Certain means: the server states their SHA-256, or an ETag that is the MD5 of our bytes. An ETag that is not says
    nothing (it may be no MD5 at all); such a part is sent again.
    """
    matching: dict[int, str] = {}
    try:
        with connection.reporting_transport(f"listing the parts of {key}"):
            for page in pages(
                connection.client.list_parts,
                (("PartNumberMarker", "NextPartNumberMarker"),),
                Bucket=connection.bucket,
                Key=key,
                UploadId=upload,
            ):
                for part in page.get("Parts", []):
                    number, etag = int(part["PartNumber"]), str(part["ETag"])
                    if number <= len(plan.parts) and _holds_part(part, number, source, plan):
                        matching[number] = etag
    except ClientError as error:
        if is_gone_upload(error):
            raise UploadGone from error
        raise connection.typed(error, f"listing the parts of {key}") from error
    return matching


def _holds_part(part: dict[str, Any], number: int, source: Source, plan: Plan) -> bool:
    offset = (number - 1) * plan.part_bytes
    if part["Size"] != min(plan.part_bytes, plan.measured.size - offset):
        return False
    stated = part.get("ChecksumSHA256")
    if stated:
        return stated == base64_of(plan.parts[number - 1])
    digest = hashlib.md5(usedforsecurity=False)
    for start in range(offset, offset + part["Size"], CHUNK_BYTES):
        digest.update(source.read_at(start, min(CHUNK_BYTES, offset + part["Size"] - start)))
    return str(part["ETag"]).strip('"') == digest.hexdigest()


def _changed(source: Source) -> Retryable:
    shown = source.path if isinstance(source, FileSource) else "the content"
    return Retryable(f"{shown} changed while it was stored; run again when nothing writes to it")

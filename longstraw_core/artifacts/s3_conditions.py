"""One-request writes that the server does only under a condition, and whether a server keeps such conditions."""

import base64
import hashlib
import uuid
from typing import Any

from botocore.exceptions import ClientError  # pyright: ignore[reportMissingTypeStubs]

from longstraw_core.artifacts.s3_answers import is_missing, is_taken
from longstraw_core.artifacts.s3_connection import Connection
from longstraw_core.artifacts.s3_reader import S3Reader
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON
from longstraw_core.spec.errors import SpecError


def put_once(connection: Connection, key: str, content: bytes, media_type: str, sha256: bytes | None = None) -> bool:
    """Create an object in one request; False when one of this name exists already. `sha256`: raw, where known."""
    checksum = base64_of(sha256 or hashlib.sha256(content).digest())

    def request() -> dict[str, Any]:
        return connection.client.put_object(
            Bucket=connection.bucket,
            Key=key,
            Body=content,
            ContentType=media_type,
            ChecksumSHA256=checksum,
            IfNoneMatch="*",
        )

    try:
        connection.sent(f"storing {key}", request)
    except ClientError as error:
        if is_taken(error):
            return False
        raise connection.typed(error, f"storing {key}") from error
    return True


def put_if(connection: Connection, key: str, content: bytes, version: str) -> bool:
    """Replace an object if its ETag is still `version`; False when the server says that it is not."""
    try:
        connection.sent(
            f"replacing {key}",
            lambda: connection.client.put_object(
                Bucket=connection.bucket,
                Key=key,
                Body=content,
                ContentType=MEDIA_TYPE_JSON,
                ChecksumSHA256=base64_of(hashlib.sha256(content).digest()),
                IfMatch=version,
            ),
        )
    except ClientError as error:
        if is_taken(error) or is_missing(error):
            return False
        raise connection.typed(error, f"replacing {key}") from error
    return True


def check_conditions(connection: Connection, root: str, uri: str) -> None:
    """Refuse a server that ignores `If-None-Match` or `If-Match`: two writers would both believe that they won.

    Tried out on an object below `root` (a key prefix that ends with '/', or nothing) that is deleted again; `uri` is
    how messages name the store.

    Raises:
        SpecError: the server ignores or does not know a condition.
    """
    key = f"{root}staging/{uuid.uuid4().hex}"
    opening = f"opening store {uri}"

    def fails(condition: str, consequence: str, fault: str = "ignores") -> SpecError:
        return SpecError(
            f"store {uri}: {connection.shown} {fault} '{condition}', so {consequence}; use a server with "
            "conditional writes"
        )

    def version() -> str:
        with connection.reporting(opening):
            return str(connection.client.head_object(Bucket=connection.bucket, Key=key)["ETag"])

    try:
        # the answer to an attempt that succeeded may have been lost, and boto3 asked again: then the bytes decide
        first = put_once(connection, key, b"first", "text/plain") or _is(connection, key, b"first")
        if put_once(connection, key, b"other", "text/plain") or not first:
            raise fails("If-None-Match: *", "nothing would be safe from being overwritten")
        if not (put_if(connection, key, b"second", version()) or _is(connection, key, b"second")):
            raise fails("If-Match", "a policy could never be moved", "does not know")
        if put_if(connection, key, b"third", '"00000000000000000000000000000000"'):
            raise fails("If-Match", "two runs could move a policy from the same checkpoint")
    finally:
        with connection.reporting(opening):
            connection.client.delete_object(Bucket=connection.bucket, Key=key)


def _is(connection: Connection, key: str, content: bytes) -> bool:
    try:
        reader = S3Reader(connection, key)
    except FileNotFoundError:
        return False
    try:
        return reader.read() == content
    finally:
        reader.close()


def base64_of(digest: bytes) -> str:
    """A raw digest as S3's headers state it."""
    return base64.b64encode(digest).decode("ascii")

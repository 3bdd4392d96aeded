"""The `s3://` store: one prefix of a bucket, written with conditional requests and SHA-256 checksums.

Layout and rules are those of every store (FORMAT.md). What the server cannot do by itself is not attempted: nothing is
locked, an object appears whole or not at all, and exactly one of several writers creates it.
"""

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError  # pyright: ignore[reportMissingTypeStubs]

from longstraw_core.artifacts.files import FoundFile, Measured, open_regular_at, reporting
from longstraw_core.artifacts.s3_answers import is_missing
from longstraw_core.artifacts.s3_conditions import base64_of, check_conditions, put_if, put_once
from longstraw_core.artifacts.s3_connection import Connection, connect, pages
from longstraw_core.artifacts.s3_reader import S3Reader
from longstraw_core.artifacts.s3_writer import (
    BytesSource,
    FileSource,
    Plan,
    Source,
    UploadGone,
    abort_upload,
    make_plan,
    put_parts,
)
from longstraw_core.artifacts.store import (
    AlreadyPublished,
    OpenObject,
    Pointer,
    Store,
    blob_name,
    check_object_name,
    check_pointer_name,
)
from longstraw_core.spec.canonical import sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON, Descriptor, check_relative_path
from longstraw_core.spec.errors import IntegrityError, Retryable, SpecError

CONCURRENT_OBJECTS = 8
"""Objects read or written at once: a server's answers are waited for, not computed."""

LOOK_FIRST_BYTES = 64 << 10
"""Larger blobs are not sent before asking whether they are stored already."""

ABANDONED_AFTER = timedelta(days=7)
"""An unfinished upload this old is taken for one that nobody will continue."""

_URI = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?")


class S3Store(Store):
    """A store below one prefix of a bucket; safe for any number of concurrent readers and writers."""

    def __init__(self, uri: str, *, create: bool = False, connection: Connection | None = None) -> None:
        match = _URI.fullmatch(uri)
        rest = uri.removeprefix("s3://")
        if match is None or "@" in rest or "?" in rest:
            # what stands there may be a secret, so it is not repeated
            shown = "the store's URI" if any(sign in rest for sign in ":@?") else repr(uri)
            raise SpecError(
                f"{shown} is not an S3 URI; write s3://bucket/prefix, without user, port or query: server and "
                "credentials come from the environment"
            )
        prefix = (match["prefix"] or "").rstrip("/")
        try:
            self._root = f"{check_relative_path(prefix)}/" if prefix else ""
        except ValueError as error:
            raise SpecError(f"store {uri}: {error}") from error
        self._uri = f"s3://{match['bucket']}/{prefix}".rstrip("/")
        self._connection = connection or connect(match["bucket"])
        with self._connection.reporting(f"opening store {self._uri}"):
            found = self._connection.client.list_objects_v2(
                Bucket=self._connection.bucket, Prefix=self._root, MaxKeys=1
            )
        self._conditions_checked = False
        if create:
            self._check_conditions()
        elif not found.get("Contents"):
            raise SpecError(f"store {self._uri} is empty; check the URI or run the pipeline first")

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return self._uri

    @property
    def concurrency(self) -> int:
        """See `CONCURRENT_OBJECTS`."""
        return CONCURRENT_OBJECTS

    def put_blob(self, source: bytes | Path, media_type: str) -> Descriptor:
        """Store bytes or a file under their digest; see `Store.put_blob`.

        A blob that exists is compared by the SHA-256 that the server states for it, and re-read where it states none.
        """
        if isinstance(source, bytes):
            measured = self._put_source(BytesSource(source), media_type)
        else:
            with reporting(f"storing {source} in {self._uri}"):
                opened = open_regular_at(str(source), None, str(source))
                try:
                    size = os.fstat(opened).st_size
                    whole = FileSource(opened, source, size)
                    measured = self._put_source(
                        BytesSource(whole.read_at(0, size)) if size <= LOOK_FIRST_BYTES else whole, media_type
                    )
                finally:
                    os.close(opened)
        return Descriptor(
            uri=blob_name(measured.digest), digest=measured.digest, size=measured.size, media_type=media_type
        )

    def create_object(self, name: str, content: bytes, media_type: str) -> Descriptor:
        """Create a named object once; see `Store.create_object`."""
        check_object_name(name)
        wanted = Descriptor(uri=name, digest=sha256_digest(content), size=len(content), media_type=media_type)
        if not put_once(self._connection, self._key(name), content, media_type):
            published = self.describe_object(name, media_type)
            if published.digest != wanted.digest:
                raise AlreadyPublished(name, published, wanted)
        return wanted

    @contextmanager
    def open_object(self, name: str) -> Generator[OpenObject, None, None]:
        """Open an object; later parts are fetched while earlier ones are read. See `Store.open_object`."""
        reader = S3Reader(self._connection, self._key(name))
        try:
            yield OpenObject(size=reader.size, stream=reader)
        finally:
            reader.close()

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name; says nothing about its bytes."""
        return self._head(name) is not None

    def walk(self, prefix: str = "") -> Iterator[FoundFile]:
        """Yield everything under a prefix; see `Store.walk`."""
        if prefix and not prefix.endswith("/"):
            raise SpecError(f"prefix {prefix!r} must be empty or end with '/'")
        with self._connection.reporting(f"listing {self._uri}/{prefix}"):
            for page in pages(
                self._connection.client.list_objects_v2,
                (("ContinuationToken", "NextContinuationToken"),),
                Bucket=self._connection.bucket,
                Prefix=self._root + prefix,
            ):
                for item in page.get("Contents", []):
                    if not {"Key", "Size", "LastModified"} <= item.keys():
                        raise SpecError(
                            f"{self._connection.shown} lists objects without name, size or time, as no S3 server does; "
                            "check AWS_ENDPOINT_URL_S3"
                        )
                    name = str(item["Key"]).removeprefix(self._root)
                    if item["Size"] == 0 and (not name or name.endswith("/")):
                        continue  # a console's marker of an empty folder
                    yield FoundFile(
                        path=name, kind="file", size=int(item["Size"]), modified=item["LastModified"].timestamp()
                    )

    def clear_stale_staging(self) -> int:
        """Abort uploads that nobody continued for a week, and delete what was tried on when a store was opened.

        Younger ones may have a living writer, or a rerun ahead.
        """
        limit = datetime.now(UTC) - ABANDONED_AFTER
        abandoned: list[tuple[str, str]] = []
        with self._connection.reporting(f"listing unfinished uploads of {self._uri}"):
            for page in pages(
                self._connection.client.list_multipart_uploads,
                (("KeyMarker", "NextKeyMarker"), ("UploadIdMarker", "NextUploadIdMarker")),
                Bucket=self._connection.bucket,
                Prefix=self._root,
            ):
                abandoned += [
                    (item["Key"], item["UploadId"]) for item in page.get("Uploads", []) if item["Initiated"] < limit
                ]
        for key, upload in abandoned:
            abort_upload(self._connection, key, upload)
        probes = [found.path for found in self.walk("staging/") if found.modified < limit.timestamp()]
        for name in probes:
            self.delete_object(name)
        return len(abandoned) + len(probes)

    def delete_object(self, name: str) -> None:
        """Delete an object; see `Store.delete_object`."""
        with self._connection.reporting(f"deleting {self._uri}/{name}"):
            self._connection.client.delete_object(Bucket=self._connection.bucket, Key=self._key(name))

    def read_pointer(self, name: str) -> Pointer | None:
        """Read a pointer with its ETag, which is only ever compared; see `Store.read_pointer`."""
        check_pointer_name(name)
        try:
            with self._connection.reporting_transport(f"reading {self._uri}/{name}"):
                answer = self._connection.client.get_object(Bucket=self._connection.bucket, Key=self._key(name))
                return Pointer(content=answer["Body"].read(), version=str(answer["ETag"]))
        except ClientError as error:
            if is_missing(error):
                return None
            raise self._connection.typed(error, f"reading {self._uri}/{name}") from error

    def replace_pointer(self, name: str, content: bytes, expected: Pointer | None) -> bool:
        """Compare and swap with `If-Match`; see `Store.replace_pointer`."""
        check_pointer_name(name)
        self._check_conditions()
        key = self._key(name)
        if expected is None:
            moved = put_once(self._connection, key, content, MEDIA_TYPE_JSON)
        else:
            moved = put_if(self._connection, key, content, expected.version)
        if moved:
            return True
        # the answer to an attempt that succeeded may have been lost, and boto3 asked again
        stored = self.read_pointer(name)
        return stored is not None and stored.content == content

    def _put_source(self, source: Source, media_type: str) -> Measured:
        plan = make_plan(source)
        name = blob_name(plan.measured.digest)
        key = self._key(name)
        if plan.measured.size > LOOK_FIRST_BYTES and self._holds(plan):
            return plan.measured
        if len(plan.parts) == 1:
            created = self._put_whole(key, source, plan, media_type)
        else:
            created = self._put_in_parts(key, source, plan, media_type)
        if not created and not self._holds(plan):
            raise IntegrityError(f"{self._uri}/{name} vanished while it was being stored; run again")
        return plan.measured

    def _put_whole(self, key: str, source: Source, plan: Plan, media_type: str) -> bool:
        self._connection.buffers.acquire()
        try:
            content = source.read_at(0, source.size)
            if sha256_digest(content) != plan.measured.digest:
                raise Retryable(f"the source of {key} changed while it was stored; run again when nothing writes to it")
            return put_once(self._connection, key, content, media_type, plan.parts[0])
        finally:
            self._connection.buffers.release()

    def _put_in_parts(self, key: str, source: Source, plan: Plan, media_type: str) -> bool:
        for _ in range(3):
            try:
                return put_parts(self._connection, key, source, plan, media_type)
            except UploadGone:
                if self._holds(plan):  # another writer of the same blob finished it
                    return True
        raise Retryable(f"{self._uri}/{key}: other writers keep ending the upload; run again")

    def _holds(self, plan: Plan) -> bool:
        """Whether the blob is stored; a corrupt one is an error and never accepted."""
        name = blob_name(plan.measured.digest)
        head = self._head(name)
        if head is None:
            return False
        stated = head.get("ChecksumSHA256")
        whole = base64_of(bytes.fromhex(plan.measured.digest.removeprefix("sha256:")))
        if head["ContentLength"] == plan.measured.size and stated in (plan.checksum, whole):
            return True
        try:
            observed = self.measure(name)
        except FileNotFoundError:
            return False
        if observed != plan.measured:
            raise IntegrityError(
                f"{self._uri}/{name} is corrupt: expected {plan.measured.digest} ({plan.measured.size} bytes), "
                f"observed {observed.digest} ({observed.size} bytes); delete the object and run again"
            )
        return True

    def _head(self, name: str) -> dict[str, Any] | None:
        try:
            with self._connection.reporting_transport(f"looking up {self._uri}/{name}"):
                return self._connection.client.head_object(
                    Bucket=self._connection.bucket, Key=self._key(name), ChecksumMode="ENABLED"
                )
        except ClientError as error:
            if is_missing(error):
                return None
            raise self._connection.typed(error, f"looking up {self._uri}/{name}") from error

    def _key(self, name: str) -> str:
        try:
            return self._root + check_relative_path(name)
        except ValueError as error:
            raise SpecError(f"object name refused: {error}") from error

    def _check_conditions(self) -> None:
        """Once per opened store, before the first write that needs them."""
        if not self._conditions_checked:
            check_conditions(self._connection, self._root, self._uri)
            self._conditions_checked = True

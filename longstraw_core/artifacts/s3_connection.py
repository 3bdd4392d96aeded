"""How an S3 server is reached: client from the environment alone, and its errors in words; knows no artifact.

Endpoint, region, credentials, CA bundle and profile come from the environment and boto3's own chain
(`AWS_ENDPOINT_URL_S3`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_CA_BUNDLE`, `~/.aws/config`, a pod's role, …). Nothing
of it is part of a URI or a specification, and nothing secret is part of a message.
"""

import os
import random
import re
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Event
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import boto3  # pyright: ignore[reportMissingTypeStubs]
from botocore import loaders  # pyright: ignore[reportMissingTypeStubs]
from botocore import session as botocore_session  # pyright: ignore[reportMissingTypeStubs]
from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]
from botocore.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    BotoCoreError,
    ClientError,
    ConfigParseError,
    InvalidRegionError,
    ProfileNotFound,
)

from longstraw_core.artifacts.s3_answers import BUSY, DAMAGED_ON_THE_WAY, NO_ANSWER, code_of, no_answer, refusal
from longstraw_core.spec.errors import IntegrityError, LongStrawError, Retryable, SpecError

PATH_STYLE_VARIABLE = "LONGSTRAW_S3_PATH_STYLE"
PARALLEL_PARTS = 8
"""Parts in memory at once, over all objects of one store: on the wire, or waiting to be hashed and written."""

READ_TIMEOUT_SECONDS = 60.0
"""How long a server may be silent."""

TOTAL_ATTEMPTS = 6
"""Attempts of one request, with exponential backoff, where `AWS_MAX_ATTEMPTS` says nothing else."""


_BOTO3: Any = boto3
_LOADERS: Any = loaders
_MODELS: Any = _LOADERS.create_loader()
"""boto3's descriptions of the service, parsed once per process."""

Result = TypeVar("Result")


class S3Client(Protocol):
    """The part of boto3's S3 client that is used here."""

    def head_object(self, **request: Any) -> dict[str, Any]: ...
    def get_object(self, **request: Any) -> dict[str, Any]: ...
    def put_object(self, **request: Any) -> dict[str, Any]: ...
    def delete_object(self, **request: Any) -> dict[str, Any]: ...
    def list_objects_v2(self, **request: Any) -> dict[str, Any]: ...
    def create_multipart_upload(self, **request: Any) -> dict[str, Any]: ...
    def upload_part(self, **request: Any) -> dict[str, Any]: ...
    def list_parts(self, **request: Any) -> dict[str, Any]: ...
    def list_multipart_uploads(self, **request: Any) -> dict[str, Any]: ...
    def complete_multipart_upload(self, **request: Any) -> dict[str, Any]: ...
    def abort_multipart_upload(self, **request: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Connection:
    """One bucket of one server, and the threads and buffers that all transfers of a store share."""

    client: S3Client
    part_client: S3Client
    """The same without hashing a body once more for the signature: for parts, once `compares` is set."""
    bucket: str
    endpoint: str
    """For messages; empty for Amazon's own."""
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PARALLEL_PARTS, "s3"))
    buffers: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(PARALLEL_PARTS))
    """One permit per part held in memory."""
    compares: Event = field(default_factory=Event)
    """Set when the server has stated the SHA-256 of a part, which it compared with the bytes that reached it."""

    @property
    def shown(self) -> str:
        """Bucket and server for messages; never credentials."""
        return f"s3://{self.bucket}" + (f" at {self.endpoint}" if self.endpoint else "")

    @contextmanager
    def reporting(self, action: str) -> Generator[None, None, None]:
        """Turn every error of boto3 inside the block into a typed one that starts with `action`."""
        try:
            yield
        except (ClientError, *NO_ANSWER) as error:
            raise self.typed(error, action) from error

    def typed(self, error: Exception, action: str) -> LongStrawError:
        """What the caller can do about an error of boto3."""
        if isinstance(error, ClientError):
            return refusal(error, f"{action}: {self.shown}")
        return no_answer(error, f"{action}: {self.shown}")

    def sent(self, action: str, request: Callable[[], Result]) -> Result:
        """Send a request that carries bytes and their checksum; again when they were damaged on the way.

        Raises:
            ClientError: the server refused for another reason, for the caller to read.
            IntegrityError: the bytes arrive damaged every time.
        """
        for attempt in range(TOTAL_ATTEMPTS):
            try:
                with self.reporting_transport(action):
                    return request()
            except ClientError as error:
                code = code_of(error)
                if code not in DAMAGED_ON_THE_WAY | BUSY:
                    raise
                if attempt == TOTAL_ATTEMPTS - 1:
                    if code in BUSY:
                        raise Retryable(f"{action}: {self.shown}: {code}: another writer is busy; run again") from error
                    raise IntegrityError(
                        f"{action}: {self.shown} received other bytes than were sent, {TOTAL_ATTEMPTS} times ({code}); "
                        "check the network, or a proxy between here and the server"
                    ) from error
            pause(attempt)
        raise AssertionError("unreachable")

    @contextmanager
    def reporting_transport(self, action: str) -> Generator[None, None, None]:
        """Like `reporting`, but the server's own refusals pass for the caller to read."""
        try:
            yield
        except NO_ANSWER as error:
            raise self.typed(error, action) from error


def connect(bucket: str) -> Connection:
    """Connect to a bucket with what the environment says; no request is sent yet.

    Raises:
        SpecError: the environment's endpoint, profile or region is malformed.
    """
    try:
        core: Any = botocore_session.Session()
        core.register_component("data_loader", _MODELS)
        scoped: dict[str, Any] = core.get_scoped_config()
        config = _config(scoped.get("s3") or {}, scoped)
        part_config = _config({"payload_signing_enabled": False, **(scoped.get("s3") or {})}, scoped)
        session, region = _BOTO3.Session(botocore_session=core), _region()
        client: Any = session.client("s3", region_name=region, config=config)
        part_client: Any = session.client("s3", region_name=region, config=part_config)
    except (BotoCoreError, ValueError) as error:
        raise SpecError(f"s3://{bucket}: {_unusable(error)}") from error
    return Connection(
        client=cast(S3Client, client),
        part_client=cast(S3Client, part_client),
        bucket=bucket,
        endpoint=_shown_endpoint(client.meta.endpoint_url),
    )


def _unusable(error: Exception) -> str:
    """What of the environment boto3 could not use."""
    if isinstance(error, ProfileNotFound):
        variable = next(
            (name for name in ("AWS_DEFAULT_PROFILE", "AWS_PROFILE") if os.environ.get(name)), "AWS_PROFILE"
        )
        return f"{variable} names profile {os.environ.get(variable, '')!r}, which no AWS config or credentials file has"
    if isinstance(error, InvalidRegionError):
        return "the region in the AWS config file is malformed; write its name, for instance eu-west-1"
    if isinstance(error, ConfigParseError):
        return "the AWS config or credentials file is malformed; check AWS_CONFIG_FILE"
    return (
        f"the environment's S3 settings cannot be used ({type(error).__name__}); check AWS_ENDPOINT_URL_S3 "
        "(http://host:port or https://host) and AWS_CA_BUNDLE"
    )


def _region() -> str | None:
    """The region that the environment names; boto3 itself reads only the second of these variables."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        region = os.environ.get(name, "")
        if region and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", region):
            raise SpecError(f"{name}={region!r} is not the name of a region; write for instance eu-west-1, or unset it")
        if region:
            return region
    return None


def _attempts(from_file: Any) -> int:
    """Attempts of one request: the environment's, the config file's, or ours."""
    name, text = "AWS_MAX_ATTEMPTS", os.environ.get("AWS_MAX_ATTEMPTS", "").strip()
    if not text and from_file is not None:
        name, text = "max_attempts in the AWS config file", str(from_file).strip()
    if not text:
        return TOTAL_ATTEMPTS
    if not re.fullmatch(r"[1-9][0-9]{0,2}", text):
        raise SpecError(f"{name}={text!r} must be a whole number from 1 to 999: how often a request is tried in all")
    return int(text)


def _retry_mode(from_file: Any) -> str:
    """boto3's way of spacing attempts."""
    name, text = "AWS_RETRY_MODE", os.environ.get("AWS_RETRY_MODE", "").strip()
    if not text and from_file is not None:
        name, text = "retry_mode in the AWS config file", str(from_file).strip()
    if text not in ("", "legacy", "standard", "adaptive"):
        raise SpecError(f"{name}={text!r} must be standard, adaptive or legacy")
    return text or "standard"


def _config(from_file: dict[str, Any], profile: dict[str, Any]) -> Config:
    style = os.environ.get(PATH_STYLE_VARIABLE, "").strip().lower()
    if style not in ("", "0", "1", "true", "false"):
        raise SpecError(f"{PATH_STYLE_VARIABLE}={style!r} must be 1 (path style) or 0 (virtual-hosted style)")
    custom_endpoint = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    s3: dict[str, Any] = {}
    if style:
        s3["addressing_style"] = "path" if style in ("1", "true") else "virtual"
    elif "addressing_style" not in from_file and custom_endpoint:
        s3["addressing_style"] = "path"  # other servers than Amazon's rarely have one host name per bucket
    return Config(
        s3={**from_file, **s3},
        retries={
            "mode": _retry_mode(profile.get("retry_mode")),  # pyright: ignore[reportArgumentType]
            "total_max_attempts": _attempts(profile.get("max_attempts")),
        },
        connect_timeout=10,
        read_timeout=READ_TIMEOUT_SECONDS,
        max_pool_connections=32,
        # our own SHA-256 headers need no trailers, which many servers do not know
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="longstraw",
    )


def _shown_endpoint(url: str) -> str:
    parts = urlsplit(url)
    if (parts.hostname or "").endswith(".amazonaws.com"):
        return ""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def pause(attempt: int) -> None:
    """Wait before the next attempt: exponential, with jitter."""
    time.sleep(random.uniform(0.5, 1.0) * min(8.0, 0.1 * 2**attempt))  # noqa: S311


def pages(
    request: Callable[..., dict[str, Any]], tokens: Iterable[tuple[str, str]], **arguments: Any
) -> Generator[dict[str, Any], None, None]:
    """Yield every page of a listing; `tokens` pairs the request's marker parameters with the response's fields."""
    marker: dict[str, Any] = {}
    while True:
        page = request(**arguments, **marker)
        yield page
        if not page.get("IsTruncated"):
            return
        following = {parameter: page.get(answer) for parameter, answer in tokens if page.get(answer)}
        if not following or following == marker:
            raise SpecError("the server cut a listing short and does not say how it goes on; use another server")
        marker = following

"""What an S3 server's refusal, or its silence, means for the caller, in words; sends nothing itself."""

import re
from typing import Any, cast

from botocore.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.parsers import ResponseParserError  # pyright: ignore[reportMissingTypeStubs]

from longstraw_core.spec.errors import LongStrawError, Retryable, SpecError

DAMAGED_ON_THE_WAY = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody"}
BUSY = {"ConditionalRequestConflict", "OperationAborted"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "StorageFull"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_UNKNOWN_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired"}

NO_ANSWER = (BotoCoreError, ResponseParserError, RecursionError)
"""What boto3 raises instead of a server's refusal. A redirect that names no region makes it ask for the region, which
is redirected too, and so on until Python ends the recursion."""


def code_of(error: ClientError) -> str:
    """The server's error code; for a HEAD request only the HTTP status."""
    return str(cast(dict[str, Any], error.response).get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of a refusal."""
    return int(cast(dict[str, Any], error.response).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: ClientError) -> bool:
    """Whether an object (not its bucket) does not exist."""
    return status_of(error) == 404 and code_of(error) not in ("NoSuchBucket", "NoSuchUpload")


def is_taken(error: ClientError) -> bool:
    """Whether a conditional write or read found the object in another state than the condition says."""
    return status_of(error) == 412 or code_of(error) == "PreconditionFailed"


def is_gone_upload(error: ClientError) -> bool:
    """Whether a multipart upload was completed or aborted by somebody else."""
    return code_of(error) == "NoSuchUpload"


def refusal(error: ClientError, where: str) -> LongStrawError:
    """What the caller can do about a refused request; `where` says which request to which server."""
    code, status = code_of(error), status_of(error)
    shown = f"{where}: {status} {code}" if code != str(status) else f"{where}: {status}"
    if code == "NoSuchBucket":
        return SpecError(f"{shown}: there is no such bucket; check the URI and the endpoint, or create the bucket")
    if code in _WRONG_REGION or status == 301:
        headers = cast(dict[str, Any], error.response).get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = re.sub(r"[^a-z0-9-]", "", str(headers.get("x-amz-bucket-region", "")))
        advice = f"set AWS_REGION={region}" if region else "set AWS_REGION to the bucket's region"
        return SpecError(f"{shown}: the bucket is in another region; {advice}")
    if code in _UNKNOWN_KEY:
        return SpecError(f"{shown}: the server does not accept these credentials; check AWS_ACCESS_KEY_ID and the rest")
    if code == "RequestTimeTooSkewed":
        return SpecError(f"{shown}: this machine's clock differs from the server's; correct it")
    if status in (401, 403):
        return SpecError(f"{shown}: not allowed; the credentials need the right to get, put and list below the prefix")
    if status == 501 or code == "NotImplemented":
        return SpecError(f"{shown}: the server lacks this; LongStraw needs conditional writes and multipart uploads")
    if code in _FULL or status == 507:
        return Retryable(f"{shown}: the server has no space left; free some, then run again")
    if status == 404:
        return SpecError(f"{shown}: not found; check the URI and that AWS_ENDPOINT_URL_S3 is an S3 server")
    if status >= 500 or code in ("SlowDown", "RequestTimeout", "Throttling", "RequestLimitExceeded"):
        return Retryable(f"{shown}: the server fails or is overloaded; run the same command again")
    return SpecError(f"{shown}: the server refuses; check the URI, the endpoint and the server's log")


def no_answer(error: Exception, where: str) -> LongStrawError:
    """What the caller can do about one of `NO_ANSWER`."""
    name = type(error).__name__
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return SpecError(f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role")
    if isinstance(error, SSLError):
        return SpecError(f"{where}: the server's certificate is not trusted; set AWS_CA_BUNDLE to its authority's file")
    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        return Retryable(
            f"{where}: no connection ({name}); check AWS_ENDPOINT_URL_S3, AWS_REGION and the network, then run again"
        )
    if isinstance(error, RecursionError):
        return SpecError(
            f"{where}: the server redirects to another place; name that one in AWS_ENDPOINT_URL_S3 (https?)"
        )
    if isinstance(error, ResponseParserError):
        return SpecError(f"{where}: the answer is not S3's; check that AWS_ENDPOINT_URL_S3 is an S3 server")
    return Retryable(f"{where}: {name}: the connection failed; run the same command again")

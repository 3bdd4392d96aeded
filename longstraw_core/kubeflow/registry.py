"""Whether a registry serves an image by its digest: the manifest request of the OCI distribution API, anonymously."""

import re
from typing import Any

from longstraw_core.spec.errors import Retryable, SpecError

_ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_TIMEOUT_SECONDS = 15.0
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")


def check_image(reference: str) -> None:
    """Ask for the manifest of `registry/repository@sha256:…`; no layer is downloaded.

    Raises:
        SpecError: the registry does not have it, or answers something else than asked for.
        Retryable: the registry cannot be reached.
    """
    from urllib3 import PoolManager, Timeout
    from urllib3.exceptions import HTTPError

    repository, _, digest = reference.partition("@")
    host, _, name = repository.partition("/")
    scheme = "http" if _LOOPBACK.fullmatch(host) else "https"
    pool = PoolManager(timeout=Timeout(total=_TIMEOUT_SECONDS), retries=2)
    url = f"{scheme}://{host}/v2/{name}/manifests/{digest}"
    headers = {"Accept": _ACCEPT}
    try:
        answer: Any = pool.request("HEAD", url, headers=headers)
        if answer.status == 401:
            token = _anonymous_token(pool, answer.headers.get("WWW-Authenticate", ""))
            if token is not None:
                answer = pool.request("HEAD", url, headers={**headers, "Authorization": f"Bearer {token}"})
    except HTTPError as error:
        raise Retryable(f"{host}: {' '.join(str(getattr(error, 'reason', error)).split())}") from error
    if answer.status in (401, 403):
        raise SpecError(f"{reference}: the registry asks who we are; anonymous pulls are refused ({answer.status})")
    if answer.status == 404:
        raise SpecError(f"{reference}: the registry has no such digest")
    if answer.status != 200:
        raise Retryable(f"{reference}: the registry answers {answer.status}")
    served = answer.headers.get("Docker-Content-Digest", digest)
    if served != digest:
        raise SpecError(f"{reference}: the registry answers with {served}")


def _anonymous_token(pool: Any, challenge: str) -> str | None:
    """Follow a `Bearer realm="…",service="…",scope="…"` challenge without credentials."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not challenge.lower().startswith("bearer ") or not re.match(r"https?://", realm):
        return None
    answer = pool.request("GET", realm, fields=fields)
    if answer.status != 200:
        return None
    try:
        body = answer.json()
    except ValueError:
        return None
    token = body.get("token") or body.get("access_token") if isinstance(body, dict) else None
    return str(token) if token else None

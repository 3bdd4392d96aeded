"""The Kubernetes API as the launcher uses it: the official client, JSON objects, our errors, bounded waiting."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import urllib3
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException
from yaml import YAMLError

from longstraw_core.cluster.journal import ObjectKind
from longstraw_core.cluster.spoken import spoken
from longstraw_core.spec import Retryable, SpecError

JsonObject = dict[str, Any]
WatchedResource = Literal["jobs", "pods"]

LONGEST_RETRY_AFTER = 60.0
"""Seconds that a server's `Retry-After` is honoured at most."""

_GONE = 410
_TRANSPORT_ERRORS = (urllib3.exceptions.HTTPError, OSError)


class Unreachable(Retryable):
    """The API server gave no usable answer for as long as was waited."""

    wait_seconds: float = 0.0
    """How long the server asked to be left alone (`Retry-After`), at most `LONGEST_RETRY_AFTER`."""


class NotSignedIn(SpecError):
    """The server does not know who asks (401): a token was replaced a moment ago, or it is wrong."""


class Exists(Exception):
    """An object of this name is there already (409)."""


class Missing(Exception):
    """There is no such object (404)."""


class Conflict(Retryable):
    """The object is not, or no longer, the one that was meant (409)."""


class Expired(Exception):
    """The server no longer knows the resource version to continue from (410)."""


@dataclass(frozen=True)
class Patience:
    """How long the API server is waited for."""

    request_seconds: float = 15.0
    """Longest time for one answer."""
    outage_seconds: float = 600.0
    """Longest time without any answer before a launcher gives up."""
    rollback_seconds: float = 30.0
    """The same while giving things back, when a pod has little time left."""
    sign_in_seconds: float = 90.0
    """Longest time of 401 before it is believed: a pod's client reads a replaced token within a minute."""
    watch_seconds: float = 240.0
    """After this the server ends a watch, and a new one continues it."""
    pause_seconds: float = 1.0
    """Pause after the first failure; it doubles up to 15 seconds."""


class ClusterApi:
    """Jobs, Services, Pods and their logs in one namespace."""

    def __init__(self, api_client: client.ApiClient, namespace: str, patience: Patience | None = None) -> None:
        self._core = client.CoreV1Api(api_client)
        self._batch = client.BatchV1Api(api_client)
        self.namespace = namespace
        self.patience = patience or Patience()

    def create(self, kind: ObjectKind, manifest: JsonObject) -> JsonObject:
        """Create an object; unknown fields are refused by the server.

        Raises:
            Exists: the name is taken.
            SpecError: the server refuses it, with the server's own words.
            Unreachable: no answer.
        """
        call = {"Job": self._batch.create_namespaced_job, "Service": self._core.create_namespaced_service}[kind]
        return self._patiently(
            f"creating {kind} {manifest['metadata']['name']}",
            lambda timeout: call(self.namespace, manifest, field_validation="Strict", **_raw(timeout)),
        )

    def get(
        self, kind: Literal["Job", "Service", "Pod"], name: str, *, within: float | None = None
    ) -> JsonObject | None:
        """Return an object, None when there is none."""
        call = {
            "Job": self._batch.read_namespaced_job,
            "Service": self._core.read_namespaced_service,
            "Pod": self._core.read_namespaced_pod,
        }[kind]
        try:
            return self._patiently(
                f"reading {kind} {name}", lambda timeout: call(name, self.namespace, **_raw(timeout)), within=within
            )
        except Missing:
            return None

    def set_owners(
        self, kind: ObjectKind, found: JsonObject, owners: list[JsonObject], annotations: JsonObject
    ) -> JsonObject:
        """Replace the owner references of exactly the object that was read.

        Raises:
            Conflict: it changed or was replaced meanwhile.
        """
        metadata = found["metadata"]
        body = {
            "metadata": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
                "ownerReferences": owners,
                "annotations": annotations,
            }
        }
        path, core = ("/apis/batch/v1", False) if kind == "Job" else ("/api/v1", True)
        api = self._core if core else self._batch
        plural = "services" if core else "jobs"
        # the typed patch methods send a strategic merge, which would add owners instead of replacing them
        return self._patiently(
            f"adopting {kind} {metadata['name']}",
            lambda timeout: api.api_client.call_api(
                f"{path}/namespaces/{self.namespace}/{plural}/{metadata['name']}",
                "PATCH",
                header_params={"Content-Type": "application/merge-patch+json", "Accept": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                **_raw(timeout),
            ),
        )

    def delete(self, kind: ObjectKind, name: str, uid: str, *, within: float | None = None) -> bool:
        """Delete the object with this uid; False when it is gone, or another object has its name.

        Its pods go first (foreground), so that a name which is free again has no pods left.
        """
        call = {"Job": self._batch.delete_namespaced_job, "Service": self._core.delete_namespaced_service}[kind]
        options = client.V1DeleteOptions(
            propagation_policy="Foreground" if kind == "Job" else "Background",
            preconditions=client.V1Preconditions(uid=uid),
        )
        try:
            self._patiently(
                f"deleting {kind} {name}",
                lambda timeout: call(name, self.namespace, body=options, **_raw(timeout)),
                within=within,
            )
        except (Missing, Conflict):
            return False
        return True

    def list_all(self, resource: WatchedResource, selector: str) -> tuple[tuple[JsonObject, ...], str]:
        """Return the selected objects and the resource version to watch from. One attempt."""
        answer = self._once(
            f"listing {resource}",
            lambda timeout: self._lister(resource)(**self._selecting(resource, selector), **_raw(timeout)),
        )
        return tuple(answer.get("items") or ()), str(answer["metadata"]["resourceVersion"])

    def watch(self, resource: WatchedResource, selector: str, version: str) -> Iterator[JsonObject]:
        """Connect, then yield watch events (`type`, `object`) after a version until the server ends the watch.

        Raises:
            Expired: the version is too old; list again.
            Unreachable: no connection (at once), or it broke (while iterating).
        """
        seconds = self.patience.watch_seconds
        response = self._once(
            f"watching {resource}",
            lambda timeout: self._lister(resource)(
                **self._selecting(resource, selector),
                watch=True,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=max(1, int(seconds)),
                _preload_content=False,
                # silence for longer than the server's own limit is a dead connection
                _request_timeout=(timeout, seconds + self.patience.request_seconds),
            ),
            parse=False,
        )
        return _events(response, f"watching {resource}")

    def warnings(self, name: str) -> list[str]:
        """Messages of the warnings about an object; empty where events may not be read. One attempt."""
        try:
            answer = self._once(
                "listing events",
                lambda timeout: self._core.list_namespaced_event(
                    self.namespace, field_selector=f"involvedObject.name={name},type=Warning", **_raw(timeout)
                ),
            )
        except (SpecError, Unreachable):
            return []
        items = sorted(
            answer.get("items") or [], key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or "")
        )
        return [f"{item.get('reason', '')}: {item.get('message', '')}" for item in items]

    def log_tail(self, pod: str, container: str, lines: int) -> str:
        """The last lines of a container's log; empty where there is none. One attempt."""
        try:
            response = self._once(
                f"reading the log of {pod}",
                lambda timeout: self._core.read_namespaced_pod_log(
                    pod,
                    self.namespace,
                    container=container,
                    tail_lines=lines,
                    limit_bytes=1 << 20,
                    _preload_content=False,
                    _request_timeout=timeout,
                ),
                parse=False,
            )
        except (SpecError, Unreachable, Missing, Conflict):
            return ""
        try:
            return bytes(response.data).decode("utf-8", errors="replace")
        except _TRANSPORT_ERRORS:
            return ""

    def follow_log(self, pod: str, container: str, since_seconds: int | None) -> Iterator[str]:
        """Yield `<time> <line>` of a container's log as it is written, until the container or connection ends."""
        arguments = {} if since_seconds is None else {"since_seconds": since_seconds}
        response = self._once(
            f"following the log of {pod}",
            lambda timeout: self._core.read_namespaced_pod_log(
                pod,
                self.namespace,
                container=container,
                follow=True,
                timestamps=True,
                _preload_content=False,
                _request_timeout=(timeout, 3600.0),
                **arguments,
            ),
            parse=False,
        )
        try:
            for line in _lines(response):
                yield line.decode("utf-8", errors="replace")
        except _TRANSPORT_ERRORS as error:
            raise Unreachable(f"following the log of {pod}: {spoken(error)}") from error
        finally:
            response.close()
            response.release_conn()

    def _lister(self, resource: WatchedResource) -> Callable[..., Any]:
        return {"jobs": self._batch.list_namespaced_job, "pods": self._core.list_namespaced_pod}[resource]

    def _selecting(self, resource: WatchedResource, selector: str) -> dict[str, Any]:
        return {"namespace": self.namespace, "field_selector" if resource == "jobs" else "label_selector": selector}

    def _patiently(self, what: str, call: Callable[[float], Any], *, within: float | None = None) -> JsonObject:
        """Repeat a call that is safe to repeat until it is answered or patience ends."""
        started, pause = time.monotonic(), self.patience.pause_seconds
        longest = self.patience.outage_seconds if within is None else within
        while True:
            try:
                return self._once(what, call)
            except (Unreachable, NotSignedIn) as error:
                wait = max(pause, error.wait_seconds if isinstance(error, Unreachable) else 0.0)
                limit = min(longest, self.patience.sign_in_seconds) if isinstance(error, NotSignedIn) else longest
                if time.monotonic() + wait > started + limit:
                    raise
            time.sleep(wait)
            pause = min(2 * pause, 15.0)

    def _once(self, what: str, call: Callable[[float], Any], *, parse: bool = True) -> Any:
        try:
            response = call(self.patience.request_seconds)
            return json.loads(response.data) if parse else response
        except client.ApiException as error:
            raise _typed(error, what, self.namespace) from error
        except (*_TRANSPORT_ERRORS, ValueError) as error:
            raise Unreachable(f"{what}: the Kubernetes API server does not answer ({spoken(error)})") from error


def _typed(error: client.ApiException, what: str, namespace: str) -> Exception:
    message, reason = _status(error)
    status = int(error.status or 0)
    if status == 404:
        return Missing(message)
    if status == 409:
        return Exists(message) if reason == "AlreadyExists" else Conflict(f"{what}: {message}")
    if status in (401, 403) and "exceeded quota" not in message:
        return (NotSignedIn if status == 401 else SpecError)(
            f"{what} in namespace {namespace}: not allowed: {message}; `longstraw doctor` lists the rights"
        )
    if status == _GONE:
        return Expired(message)
    # 413 is the server's own limit; what exceeds etcd's comes back as 500
    if status in (400, 403, 405, 413, 415, 422) or "request is too large" in message:
        return SpecError(f"{what}: the Kubernetes API server refuses it: {message}")
    unreachable = Unreachable(f"{what}: HTTP {status}: {message}")
    unreachable.wait_seconds = _retry_after(error)
    return unreachable


def _retry_after(error: client.ApiException) -> float:
    """Seconds of the answer's `Retry-After`; 0 when there is none, or a date."""
    text = str((error.headers or {}).get("Retry-After") or "").strip()
    return min(float(text), LONGEST_RETRY_AFTER) if text.isdecimal() else 0.0


def _status(error: client.ApiException) -> tuple[str, str]:
    """Message and reason of the `Status` object in an answer."""
    body = error.body.decode("utf-8", errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        return spoken(error.reason or body), ""
    return spoken(status.get("message") or error.reason), str(status.get("reason") or "")


def _raw(timeout: float) -> dict[str, Any]:
    return {"_preload_content": False, "_request_timeout": timeout}


def _events(response: Any, what: str) -> Iterator[JsonObject]:
    try:
        for line in _lines(response):
            event = json.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                if status.get("code") == _GONE:
                    raise Expired
                raise Unreachable(f"{what}: {status.get('message') or status.get('reason')}")
            yield event
    except (*_TRANSPORT_ERRORS, ValueError) as error:
        raise Unreachable(f"{what}: {spoken(error)}") from error
    finally:
        response.close()
        response.release_conn()


def _lines(response: Any) -> Iterator[bytes]:
    buffer = bytearray()
    for chunk in response.stream(amt=None, decode_content=False):
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            yield bytes(buffer[:end])
            del buffer[: end + 1]
    if buffer:
        yield bytes(buffer)


def connect(*, kubeconfig: str | None = None, context: str | None = None) -> client.ApiClient:
    """Return a client signed in as this pod, or as the kubeconfig says outside of a cluster.

    Raises:
        SpecError: neither is there.
    """
    configuration = client.Configuration()
    try:
        if kubeconfig is None and context is None:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except ConfigException:
                config.load_kube_config(client_configuration=configuration)
        else:
            config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=configuration)
    # a file that is no YAML, or no text, is told by the parser's own errors
    except (ConfigException, OSError, TypeError, ValueError, YAMLError) as error:
        raise SpecError(
            f"no Kubernetes cluster is configured: {spoken(error)}; set KUBECONFIG or pass --kubeconfig"
        ) from error
    return make_client(configuration)


def make_client(configuration: client.Configuration) -> client.ApiClient:
    """Return a client that leaves repeating to this module."""
    configuration.retries = False  # pyright: ignore[reportAttributeAccessIssue]
    return client.ApiClient(configuration)

"""The fake over HTTP/1.1: paths, tokens, RBAC, chunked watches with bookmarks, and pod logs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.servers.kubernetes_api.answers import Refused, bad_request, invalid
from tests.servers.kubernetes_api.controllers import CONTROLLERS
from tests.servers.kubernetes_api.kubelet import LogStore
from tests.servers.kubernetes_api.storage import KINDS, Storage
from tests.servers.kubernetes_api.validation import is_label

JsonObject = dict[str, Any]
ADMINISTRATOR, LAUNCHER = "administrator-token", "launcher-token"
BOOKMARK_SECONDS = 0.3
GROUPS = {"jobs": "batch"}
MAX_REQUEST_BYTES = 3 << 20
FIELDS = {
    "jobs": {"status.successful"},
    "pods": {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase"},
    "events": {f"involvedObject.{part}" for part in ("kind", "namespace", "name", "uid")} | {"reason", "type"},
}
"""Fields by which the real server selects, besides name and namespace."""


@dataclass
class FakeServer:
    """What the handler needs: state, logs, rights, and a record of what the launcher asked for."""

    rules: list[JsonObject]
    """Of a Role in `namespace`: they give no right in another one, and none at the cluster's scope."""
    namespace: str = "team"
    tokens: set[str] = field(default_factory=lambda: {LAUNCHER})
    """Launchers' tokens that are valid now."""
    refusals: list[tuple[int, int]] = field(default_factory=list)
    """(status, seconds of `Retry-After`) of the launcher's next answers."""
    storage: Storage = field(default_factory=lambda: Storage(controllers=list(CONTROLLERS)))
    logs: LogStore = field(default_factory=LogStore)
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """(group, resource, verb) of the launcher's allowed requests."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of the launcher's requests, in order."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def authorize(self, token: str, group: str, resource: str, verb: str, namespace: str, name: str) -> None:
        if token == ADMINISTRATOR:
            return
        if token not in self.tokens:
            raise Refused(401, "Unauthorized", "Unauthorized")
        if self.refusals:
            status, seconds = self.refusals.pop(0)
            raise Refused(status, "TooManyRequests", "too many requests, please try again later", retry_after=seconds)
        for rule in self.rules if namespace == self.namespace else ():
            if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                self.used.add((group, resource, verb))
                return
        full = f"{resource}.{group}" if group else resource
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        raise Refused(
            403,
            "Forbidden",
            f'{full} "{name}" is forbidden: User "launcher" cannot {verb} resource "{resource}" in API group '
            f'"{group}" {where}',
        )


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    """Serve on a free loopback port; yields the URL."""

    class Handler(_Handler):
        fake = server

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        server.stopping.set()
        with server.storage.changed:
            server.storage.changed.notify_all()
        listener.shutdown()
        listener.server_close()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        try:
            if length > MAX_REQUEST_BYTES:
                message = f"Request entity too large: limit is {MAX_REQUEST_BYTES}"
                raise Refused(413, "RequestEntityTooLarge", message)
            self._dispatch(method, raw)
        except Refused as refused:
            self._send(refused.code, refused.status(), retry_after=refused.retry_after)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _dispatch(self, method: str, raw: bytes) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        namespace, plural, name, subresource = _read_path(parts.path)
        watching = query.get("watch") in ("true", "True", "1")
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}.get(method) or (
            "get" if name else "watch" if watching else "list"
        )
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token != ADMINISTRATOR:
            self.fake.requests.append((method, parts.path))
        group = GROUPS.get(plural, "")
        resource = f"{plural}/{subresource}" if subresource else plural
        self.fake.authorize(token, group, resource, verb, namespace, name)
        storage = self.fake.storage
        if subresource == "log":
            self._log(storage.get("pods", namespace, name), query)
        elif verb == "get":
            with storage.changed:
                self._send(200, storage.get(plural, namespace, name))
        elif verb == "list":
            self._list(plural, namespace, query)
        elif verb == "watch":
            self._watch(plural, namespace, query)
        elif verb == "create":
            if query.get("fieldValidation", "Strict") not in ("Strict", "Warn", "Ignore"):
                raise bad_request("fieldValidation: Unsupported value")
            self._send(201, storage.create(plural, namespace, _json(raw)))
        elif verb == "patch":
            if self.headers.get("Content-Type") != "application/merge-patch+json":
                raise Refused(415, "UnsupportedMediaType", "this fake takes application/merge-patch+json only")
            self._send(200, storage.patch(plural, namespace, name, _json(raw), subresource))
        elif verb == "delete":
            options = _json(raw) if raw else {}
            options |= {key: query[key] for key in ("propagationPolicy",) if key in query}
            self._send(200, storage.delete(plural, namespace, name, options))
        else:
            raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        storage = self.fake.storage
        _check_selectors(plural, query)
        with storage.changed:
            items = [item for item in storage.all(plural, namespace or None) if _selected(item, query)]
            api_version, kind = KINDS[plural]
            self._send(
                200,
                {
                    "kind": f"{kind}List",
                    "apiVersion": api_version,
                    "metadata": {"resourceVersion": str(storage.version)},
                    "items": items,
                },
            )

    def _watch(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        storage = self.fake.storage
        _check_selectors(plural, query)
        seconds = float(query.get("timeoutSeconds", "1800"))
        bookmarks = query.get("allowWatchBookmarks") in ("true", "True")
        started = time.monotonic()
        with storage.changed:
            version = int(query.get("resourceVersion") or 0)
            first = version == 0
            current = [item for item in storage.all(plural, namespace or None) if _selected(item, query)]
            start = storage.version if first else version
            too_old = not first and version < storage.oldest
        self._begin_chunks()
        if too_old:
            expired = Refused(410, "Expired", f"too old resource version: {version} ({storage.version})")
            self._chunk({"type": "ERROR", "object": expired.status()})
            self._end_chunks()
            return
        if first:
            for item in current:
                self._chunk({"type": "ADDED", "object": item})
        seen: set[str] = {item["metadata"]["uid"] for item in current}
        last_bookmark = time.monotonic()
        while time.monotonic() - started < seconds and not self.fake.stopping.is_set():
            with storage.changed:
                fresh = [entry for entry in storage.history if entry[0] > start and entry[1] == plural]
                if not fresh:
                    storage.changed.wait(timeout=BOOKMARK_SECONDS)
                    fresh = [entry for entry in storage.history if entry[0] > start and entry[1] == plural]
                newest = storage.version
            for number, _, kind, item in fresh:
                start = number
                if (namespace and item["metadata"].get("namespace") != namespace) or not _selected(item, query):
                    continue
                shown = "ADDED" if kind == "MODIFIED" and item["metadata"]["uid"] not in seen and first else kind
                seen.add(item["metadata"]["uid"])
                self._chunk({"type": shown, "object": item})
            if bookmarks and time.monotonic() - last_bookmark > BOOKMARK_SECONDS:
                last_bookmark, start = time.monotonic(), max(start, newest if not fresh else start)
                api_version, kind = KINDS[plural]
                empty = {"kind": kind, "apiVersion": api_version, "metadata": {"resourceVersion": str(start)}}
                self._chunk({"type": "BOOKMARK", "object": empty})
        self._end_chunks()

    def _log(self, pod: JsonObject, query: dict[str, str]) -> None:
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        if container not in [item["name"] for item in pod["spec"]["containers"]]:
            raise bad_request(f"container {container} is not valid for pod {pod['metadata']['name']}")
        statuses = pod["status"].get("containerStatuses") or []
        state = statuses[0].get("state", {}) if statuses else {}
        for field_name, least in (("sinceSeconds", 1), ("limitBytes", 1), ("tailLines", 0)):
            if field_name in query and int(query[field_name]) < least:
                raise invalid("PodLogOptions", "", f"{field_name}: must be greater than or equal to {least}")
        if "running" not in state and "terminated" not in state:
            raise bad_request(f'container "{container}" in pod "{pod["metadata"]["name"]}" is waiting to start')
        self._begin_chunks("text/plain")
        for line in self.fake.logs.lines(
            pod["metadata"]["name"],
            follow=query.get("follow") in ("true", "True"),
            timestamps=query.get("timestamps") in ("true", "True"),
            tail=None if "tailLines" not in query else int(query["tailLines"]),
            stopping=self.fake.stopping,
        ):
            self._chunk_bytes(line.encode() + b"\n")
        self._end_chunks()

    def _send(self, code: int, body: JsonObject, *, retry_after: int | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _begin_chunks(self, content_type: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, event: JsonObject) -> None:
        self._chunk_bytes(json.dumps(event).encode() + b"\n")

    def _chunk_bytes(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _end_chunks(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


def _json(raw: bytes) -> JsonObject:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body is not an object")
    return value


def _read_path(path: str) -> tuple[str, str, str, str]:
    """Namespace, plural, name and subresource."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[:2] == ["api", "v1"] else parts[3:] if parts[:1] == ["apis"] else None
    if not rest:
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural = rest[0]
    expected = ["apis", "batch", "v1"] if GROUPS.get(plural) == "batch" else ["api", "v1"]
    if plural not in KINDS or parts[: len(expected)] != expected:
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    return namespace, plural, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""


def _check_selectors(plural: str, query: dict[str, str]) -> None:
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name = term.partition("=")[0]
        if name not in {"metadata.name", "metadata.namespace", *FIELDS.get(plural, ())}:
            raise bad_request(f'field label not supported: "{name}"')
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if not is_label(key, value.lstrip("=")):
            raise bad_request(f'unable to parse requirement: "{term}"')


def _selected(item: JsonObject, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if not equals or labels.get(key) != value.lstrip("="):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        found: Any = item
        for part in path.split("."):
            found = (found or {}).get(part)
        if found != value:
            return False
    return True

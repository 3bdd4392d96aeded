"""An HTTP fake of the read-only corner of the Kubernetes API that `logs` and `doctor` use; whatever it does not know
is refused, so that a test fails when more is asked."""

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

Permission = tuple[str, str, str]
"""(API group, resource with its subresource after a slash, verb)."""


@dataclass
class KubernetesReads:
    """What the server knows; tests set it and read `requests` and `reviews`."""

    namespace: str = "team"
    pods: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    queues: dict[str, dict[str, Any]] = field(default_factory=dict)
    denied: set[Permission] = field(default_factory=set)
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    broken_logs: int = 0
    """How many of the next log answers break off after half of their lines."""
    reviews: list[Permission] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    server: str = ""

    def pod(self, name: str, stage: str, run: str, lines: list[str], *, phase: str = "Succeeded") -> None:
        """Add a stage's pod with its log; a pod that is Pending has none."""
        state = {"Pending": {"waiting": {}}, "Running": {"running": {}}}.get(phase, {"terminated": {"exitCode": 0}})
        self.pods.append(
            {
                "metadata": {
                    "name": name,
                    "creationTimestamp": f"2026-01-01T00:{len(self.pods):02d}:00Z",
                    "labels": {"pipeline/runid": run, "longstraw.io/stage": stage},
                },
                "spec": {"containers": [{"name": "main"}]},
                "status": {
                    "phase": phase,
                    "containerStatuses": [
                        {"name": "main", "ready": True, "restartCount": 0, "image": "", "imageID": "", "state": state}
                    ],
                },
            }
        )
        self.logs[name] = lines

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig of this server."""
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [
                        {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": self.namespace}}
                    ],
                    "clusters": [{"name": "c", "cluster": {"server": self.server}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        return path

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, Any]:
        """Return (status, answer)."""
        parsed = urllib.parse.urlparse(url)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(parsed.query).items()}
        self.requests.append((method, parsed.path))
        own = f"/api/v1/namespaces/{self.namespace}/pods"
        queues = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{self.namespace}/localqueues/"
        if method == "POST" and parsed.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
            return 201, self._review(json.loads(body))
        if method != "GET":
            return 405, None
        if parsed.path == "/version":
            return 200, {"major": "1", "minor": "33", "gitVersion": "v1.33.1"}
        if parsed.path == own:
            return 200, {"items": [pod for pod in self.pods if _selected(pod, query.get("labelSelector", ""))]}
        if parsed.path.startswith(own + "/") and parsed.path.endswith("/log"):
            lines = self.logs.get(parsed.path.split("/")[-2])
            if ("", "pods/log", "get") in self.denied:
                return 403, None
            if lines is None or query.get("container") != "main":
                return 404, None
            kept = lines[len(lines) - int(query["tailLines"]) :] if "tailLines" in query else lines
            return 200, "".join(line + "\n" for line in kept)
        if parsed.path == "/api/v1/nodes" and ("", "nodes", "list") in self.denied:
            return 403, None
        if parsed.path.startswith(queues) and ("kueue.x-k8s.io", "localqueues", "get") in self.denied:
            return 403, None
        if parsed.path == "/api/v1/nodes":
            return 200, {"items": self.nodes}
        if parsed.path.startswith(queues):
            found = self.queues.get(parsed.path.removeprefix(queues))
            return (200, found) if found else (404, None)
        return 404, None

    def _review(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body["spec"]["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        permission = (asked.get("group", ""), resource, asked["verb"])
        self.reviews.append(permission)
        allowed = permission not in self.denied and asked.get("namespace") in (self.namespace, None)
        return {**body, "status": {"allowed": allowed}}


def _selected(pod: dict[str, Any], selector: str) -> bool:
    labels = pod["metadata"]["labels"]
    for term in filter(None, selector.split(",")):
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True


@contextmanager
def kubernetes_reads(**fields: Any) -> Iterator[KubernetesReads]:
    """Serve on loopback."""
    state = KubernetesReads(**fields)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Tests read `requests` instead."""

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                status, answer = state.answer(self.command, self.path, body)
                if state.failures:
                    status, answer = state.failures.pop(0), None
                is_log = isinstance(answer, str)
                cut = is_log and state.broken_logs > 0
                state.broken_logs -= int(cut)
            if answer is None:
                answer = {"kind": "Status", "status": "Failure", "code": status, "reason": "NotFound"}
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if is_log else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = self.close_connection or cut

        do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.server = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()

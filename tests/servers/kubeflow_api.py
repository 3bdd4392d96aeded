"""An HTTP fake of KFP's API server (v2beta1) that checks what it is sent as the real one does, for the stock `kfp`
command and for ours.

It knows experiments, pipelines, versions and runs; refuses undeclared, missing and wrongly typed parameters, taken
names, unknown ids, missing tokens and oversize parameters; and lets a run advance one scripted step per look at it.
"""

import email
import email.policy
import json
import re
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

PREFIX = "/apis/v2beta1"
CREATED = "2026-01-01T00:00:00Z"
MAX_PARAMETER_BYTES = 10_000
MAX_UPLOAD_BYTES = 32 << 20
FINAL = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
TYPES: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "BOOLEAN": (bool,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "LIST": (list,),
    "STRUCT": (dict,),
}

Step = dict[str, str]
"""States after one look: `run` and the names of tasks, as `transaction 1/train`, to states."""


class Refused(Exception):
    """An error answer, in the form of the gRPC gateway."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class KubeflowApi:
    """The server's whole state; tests set the first fields and read the others."""

    multi_user: bool = False
    token: str | None = None
    version: str | None = "2.17.0"
    """What v1beta1/healthz says; None: that API is not served."""
    prefix: str = ""
    """Path below which the API is served, as behind a gateway."""
    script: list[Step] = field(default_factory=lambda: [{"run": "RUNNING"}, {"run": "SUCCEEDED"}])
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers; 0 breaks the connection off."""
    lost_answers: int = 0
    """How many of the next runs are created without an answer."""
    endpoint: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    terminated: set[str] = field(default_factory=set)

    def answer(self, method: str, url: str, headers: Any, body: bytes) -> dict[str, Any]:
        """Return the answer to one request, or raise `Refused`."""
        parsed = urllib.parse.urlparse(url)
        if not parsed.path.startswith(self.prefix + "/apis/"):
            raise Refused(404, "Not Found")
        parsed = parsed._replace(path=parsed.path.removeprefix(self.prefix))
        query = {name: values[0] for name, values in urllib.parse.parse_qs(parsed.query).items()}
        self.requests.append((method, parsed.path))
        if self.token is not None and headers.get("Authorization") != f"Bearer {self.token}":
            raise Refused(401, "Request header error: there is no valid token")
        if parsed.path == "/apis/v1beta1/healthz" and self.version is not None:
            return {"commit_sha": "0" * 40, "tag_name": self.version, "multi_user": self.multi_user}
        path = parsed.path.removeprefix(PREFIX)
        if not parsed.path.startswith(PREFIX):
            raise Refused(404, "Not Found")
        match (method, path.strip("/").split("/")):
            case ("GET", ["healthz"]):
                return {"multi_user": self.multi_user}
            case ("GET", ["experiments"]):
                return self._listed("experiments", self.experiments, query)
            case ("POST", ["experiments"]):
                return self._create_experiment(json.loads(body))
            case ("GET", ["pipelines"]):
                return self._listed("pipelines", self.pipelines, query)
            case ("POST", ["pipelines"]):
                return self._create_pipeline(json.loads(body))
            case ("POST", ["pipelines", "upload"]):
                pipeline = self._create_pipeline(
                    {"display_name": query.get("name"), "namespace": query.get("namespace")}
                )
                self._add_version(pipeline["pipeline_id"], query["name"], headers, body)
                return pipeline
            case ("POST", ["pipelines", "upload_version"]):
                return self._add_version(query.get("pipelineid", ""), query.get("name", ""), headers, body)
            case ("GET", ["pipelines", pipeline_id, "versions"]):
                own = {key: value for key, value in self.versions.items() if value["pipeline_id"] == pipeline_id}
                return self._listed("pipeline_versions", own, query)
            case ("POST", ["runs"]):
                return self._create_run(json.loads(body))
            case ("GET", ["runs"]):
                return {"runs": list(self.runs.values()), "total_size": len(self.runs)}
            case ("GET", ["runs", run_id]):
                return self._look(run_id)
            case ("POST", ["runs", named]) if named.endswith(":terminate"):
                run_id = named.removesuffix(":terminate")
                if run_id not in self.runs:
                    raise Refused(404, f"Run {run_id} not found")
                self.terminated.add(run_id)
                return {}
            case _:
                raise Refused(404, "Not Found")

    def _listed(self, name: str, entries: dict[str, dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
        found = list(entries.values())
        for predicate in json.loads(query.get("filter", "{}")).get("predicates", ()):
            if predicate.get("operation") not in ("EQUALS", 1) or predicate.get("key") not in ("display_name", "name"):
                raise Refused(400, f"Invalid filter: {predicate}")
            wanted = predicate.get("stringValue", predicate.get("string_value"))
            found = [entry for entry in found if entry["display_name"] == wanted]
        if self.multi_user and name != "pipeline_versions":
            found = [entry for entry in found if entry.get("namespace") == query.get("namespace")]
        return {name: found, "total_size": len(found)} if found else {}

    def _create_experiment(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_namespace(body)
        self._check_free(self.experiments, body)
        entry = {**body, "experiment_id": str(uuid.uuid4()), "created_at": CREATED}
        return self.experiments.setdefault(entry["experiment_id"], entry)

    def _create_pipeline(self, body: dict[str, Any]) -> dict[str, Any]:
        if not body.get("display_name"):
            raise Refused(400, "pipeline's name cannot be empty")
        self._check_namespace(body)
        self._check_free(self.pipelines, body)
        entry = {**body, "pipeline_id": str(uuid.uuid4()), "created_at": CREATED}
        return self.pipelines.setdefault(entry["pipeline_id"], entry)

    def _check_namespace(self, body: dict[str, Any]) -> None:
        if self.multi_user and not body.get("namespace"):
            raise Refused(400, "Invalid input error: namespace cannot be empty in multi-user mode")
        if not self.multi_user and body.get("namespace"):
            raise Refused(400, "Invalid input error: in single-user mode, namespace must be empty")

    @staticmethod
    def _check_free(entries: dict[str, dict[str, Any]], body: dict[str, Any]) -> None:
        for entry in entries.values():
            if (entry["display_name"], entry.get("namespace")) == (body["display_name"], body.get("namespace")):
                raise Refused(409, f"Already exist error: the name {body['display_name']} already exists")

    def _add_version(self, pipeline_id: str, name: str, headers: Any, body: bytes) -> dict[str, Any]:
        if pipeline_id not in self.pipelines:
            raise Refused(404, f"Pipeline {pipeline_id} not found")
        if any(
            (entry["pipeline_id"], entry["display_name"]) == (pipeline_id, name) for entry in self.versions.values()
        ):
            raise Refused(409, f"Already exist error: the name {name} already exists")
        content = _uploaded_file(headers, body)
        if len(content) > MAX_UPLOAD_BYTES:
            raise Refused(400, "File size too large")
        documents = list(yaml.load_all(content, Loader=yaml.CSafeLoader))
        if not documents or "deploymentSpec" not in documents[0]:
            raise Refused(400, "Invalid input error: unknown pipeline spec format")
        version_id = str(uuid.uuid4())
        self.uploads[version_id] = content
        entry = {
            "pipeline_id": pipeline_id,
            "pipeline_version_id": version_id,
            "display_name": name,
            "created_at": CREATED,
        }
        return self.versions.setdefault(version_id, entry)

    def _create_run(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("experiment_id") not in self.experiments:
            raise Refused(400, "Invalid input error: experiment not found")
        reference = body.get("pipeline_version_reference")
        if reference:
            version = self.versions.get(reference.get("pipeline_version_id", ""))
            if version is None or version["pipeline_id"] != reference.get("pipeline_id"):
                raise Refused(400, "Invalid input error: pipeline version not found")
            pipeline = next(yaml.load_all(self.uploads[version["pipeline_version_id"]], Loader=yaml.CSafeLoader))
        else:
            pipeline = body["pipeline_spec"].get("pipeline_spec", body["pipeline_spec"])
        runtime = body.get("runtime_config") or {}
        _check_parameters(pipeline, runtime.get("parameters") or {})
        root = runtime.get("pipeline_root")
        if root and not re.match(r"(s3|gs|minio)://", root):
            raise Refused(400, f"Invalid input error: pipeline root {root}")
        run_id = str(uuid.uuid4())
        entry = {**body, "run_id": run_id, "state": "PENDING", "created_at": CREATED}
        self.looks[run_id] = 0
        return self.runs.setdefault(run_id, entry)

    def _look(self, run_id: str) -> dict[str, Any]:
        run = self.runs.get(run_id)
        if run is None:
            raise Refused(404, f"Run {run_id} not found")
        states: Step = {}
        for step in self.script[: self.looks[run_id] + 1]:
            states |= step
        self.looks[run_id] += 1
        if run_id in self.terminated and states["run"] not in FINAL:
            states = dict.fromkeys(states, "CANCELED")
        run["state"] = states["run"]
        run["run_details"] = {"task_details": list(_task_details(run_id, states))}
        if run["state"] in FINAL:
            run["finished_at"] = "2026-01-01T01:00:00Z"
        if run["state"] == "FAILED":
            run["error"] = {"code": 13, "message": "a step failed"}
        return run


def _task_details(run_id: str, states: Step) -> Iterator[dict[str, Any]]:
    """Tasks as KFP lists them: the root, a driver per task, and parents that name their children."""

    def detail(name: str, task_id: str, state: str, children: list[str]) -> dict[str, Any]:
        started = state != "PENDING"
        found = {
            "run_id": run_id,
            "task_id": task_id,
            "display_name": name,
            "state": state,
            "create_time": CREATED,
            "start_time": CREATED if started else "1970-01-01T00:00:00Z",
            "end_time": "2026-01-01T00:00:42Z" if state in FINAL else "0001-01-01T00:00:00Z",
            "child_tasks": [{"task_id": child, "pod_name": ""} for child in children],
        }
        return found | ({"error": {"code": 2, "message": f"{name} exited with code 3"}} if state == "FAILED" else {})

    names = [name for name in states if name != "run"]
    parents = sorted({name.rpartition("/")[0] for name in names if "/" in name})
    yield detail("root", "root", states["run"], [*parents, *(name for name in names if "/" not in name)])
    for parent in parents:
        yield detail(parent, parent, states["run"], [name for name in names if name.startswith(parent + "/")])
    for name in names:
        short = name.rpartition("/")[2]
        yield detail(f"{short}-driver", f"{name} driver", "SUCCEEDED", [])
        yield detail(short, name, states[name], [])
        yield detail("executor", f"{name} executor", states[name], [])


def _check_parameters(pipeline: dict[str, Any], parameters: dict[str, Any]) -> None:
    declared = pipeline["root"].get("inputDefinitions", {}).get("parameters", {})
    if len(json.dumps(parameters)) > MAX_PARAMETER_BYTES:
        raise Refused(400, "Invalid input error: the input parameter length exceed maximum size of 10000")
    for name, value in parameters.items():
        if name not in declared:
            raise Refused(400, f"Invalid input error: parameter {name} is not declared")
        kind = declared[name]["parameterType"]
        if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
            raise Refused(400, f"Invalid input error: input parameter {name} requires type {kind}, got {value!r}")
    for name, entry in declared.items():
        if name not in parameters and "defaultValue" not in entry and not entry.get("isOptional"):
            raise Refused(400, f"Invalid input error: parameter {name} is missing")


def _uploaded_file(headers: Any, body: bytes) -> bytes:
    message = email.message_from_bytes(
        b"Content-Type: " + headers["Content-Type"].encode() + b"\r\n\r\n" + body, policy=email.policy.HTTP
    )
    for part in message.iter_parts():  # type: ignore[attr-defined]
        if part.get_param("name", header="content-disposition") == "uploadfile":
            return part.get_payload(decode=True)
    raise Refused(400, "Failed to read pipeline from file: no part uploadfile")


@contextmanager
def kubeflow_api(**fields: Any) -> Iterator[KubeflowApi]:
    """Serve a fresh installation on loopback."""
    state = KubeflowApi(**fields)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Tests read `requests` instead."""

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = 200, {}
            with lock:
                if state.failures:
                    status = state.failures.pop(0)
                    answer = {"error": "upstream connect error", "code": 14}
                    if status == 0:
                        self.close_connection = True
                        return
                else:
                    try:
                        answer = state.answer(self.command, self.path, self.headers, body)
                    except Refused as refusal:
                        status = refusal.status
                        answer = {"error": str(refusal), "message": str(refusal), "code": 3}
                    if state.lost_answers and (self.command, "/runs") == ("POST", self.path[-5:]):
                        state.lost_answers -= 1
                        self.close_connection = True
                        return
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.endpoint = f"http://127.0.0.1:{server.server_port}{state.prefix}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()

"""Runs on a cluster: the three ways of starting one, how it is watched, and how its pods are hurt."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import urllib3
import yaml
from botocore.config import Config

from longstraw_core.cluster.names import STAGE_LABEL
from tests.e2e.cluster.manifests import REGION, Team, specification
from tests.e2e.cluster.tools import SetupError, run
from tests.e2e.expectations import COMMAND, ROOT, small_specification

RUN_LABEL = "pipeline/runid"
_HTTP_SECONDS = 60
_RUN_ADDRESS = re.compile(r"/runs/details/(?P<id>[0-9a-fA-F-]+)")
# Every process of a container but its first, which reports the end, and the one that does this.
KILL_ALL = """
import contextlib, os, signal
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(name), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Access:
    """How this machine reaches the cluster, one team's Kubeflow Pipelines and the store."""

    kubeconfig: Path
    team: Team
    kubeflow: str
    storage: str

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl in the team's namespace."""
        place = ("--kubeconfig", str(self.kubeconfig), "--namespace", self.team.namespace)
        return run("kubectl", *place, *arguments, given=given)

    def may(self, account: str, verb: str, resource: str) -> bool:
        """Whether a service account, `namespace:name`, has a right in the team's namespace."""
        place = ("--kubeconfig", str(self.kubeconfig), "--namespace", self.team.namespace)
        asked = ("auth", "can-i", verb, resource, f"--as=system:serviceaccount:{account}")
        # the exit code of `no` is that of an error
        answer = subprocess.run(["kubectl", *place, *asked], capture_output=True, text=True, check=False)
        assert answer.stdout.strip() in ("yes", "no"), answer.stderr
        return answer.stdout.strip() == "yes"

    def longstraw(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run our command with the team's credentials."""
        return subprocess.run(
            [*COMMAND, *arguments], cwd=ROOT, env=self.environment(), capture_output=True, text=True, check=False
        )

    def environment(self) -> dict[str, str]:
        """Variables of commands on this machine."""
        own = {"AWS_ENDPOINT_URL_S3": self.storage, "AWS_REGION": REGION, "KUBECONFIG": str(self.kubeconfig)}
        return {**os.environ, **own, **self.team.keys(), "KFP_ENDPOINT": self.kubeflow}

    def store_client(self) -> Any:
        """boto3 client with the team's credentials."""
        keys = self.team.keys()
        return boto3.client(
            "s3",
            endpoint_url=self.storage,
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            region_name=REGION,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


@dataclass
class ClusterRun:
    """A run of Kubeflow Pipelines by its id."""

    access: Access
    identity: str
    said: list[str] = field(default_factory=list)

    def wait(self, seconds: float) -> bool:
        command = [*COMMAND, "status", self.identity, "-f", "--endpoint", self.access.kubeflow]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.access.environment(),
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"run {self.identity} goes on after {seconds:.0f} s\n{self.text()}") from error
        self.said.append(done.stdout + done.stderr)
        return done.returncode == 0

    def text(self) -> str:
        """What `status` said, the stages' logs, and why containers wait, for instance for an image."""
        logs = self.access.longstraw("logs", self.identity, "-n", self.access.team.namespace)
        waiting = [
            json.dumps(status["state"]) for pod in self.pods() for status in pod["status"].get("containerStatuses", [])
        ]
        with contextlib.suppress(SetupError):
            waiting.append(self.access.kubectl("get", "events", "--output", "wide"))
        return "\n".join([*self.said, logs.stdout, logs.stderr, *waiting])

    def pods(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Return the run's own pods, of one stage or all."""
        labels = f"{RUN_LABEL}={self.identity}" + (f",{STAGE_LABEL}={stage}" if stage else "")
        return json.loads(self.access.kubectl("get", "pods", "--selector", labels, "--output", "json"))["items"]

    def running_pod(self, stage: str, seconds: float = 900.0) -> str:
        """Wait until a pod of the stage has printed something of its own and return the pod's name."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for pod in self.pods(stage):
                name = pod["metadata"]["name"]
                if pod["status"]["phase"] == "Running":
                    with contextlib.suppress(SetupError):
                        if stage in self.access.kubectl("logs", name, "--container", "main"):
                            return name
            time.sleep(1)
        raise AssertionError(f"{stage} did not begin within {seconds:.0f} s\n{self.text()[-4000:]}")

    def kill_stage(self, stage: str) -> None:
        # the container is gone before the command answers
        with contextlib.suppress(SetupError):
            self.access.kubectl("exec", self.running_pod(stage), "--container", "main", "--", "python3", "-c", KILL_ALL)

    def delete_pod(self, stage: str) -> None:
        """Delete a pod of a stage that has begun, as an eviction does."""
        self.access.kubectl("delete", "pod", self.running_pod(stage), "--wait=false")


@dataclass(frozen=True)
class ClusterDriver:
    """Starts runs of one team; `start` is `longstraw submit`."""

    access: Access
    lock: Path
    directory: Path

    def images(self) -> dict[str, str]:
        return json.loads(self.lock.read_text(encoding="utf-8"))

    def store(self) -> str:
        return self.access.team.store

    def store_client(self) -> Any:
        return self.access.store_client()

    def store_environment(self) -> dict[str, str]:
        return self.access.environment()

    def specification(self, name: str, *, nodes: int = 1) -> Path:
        """Write the small specification, whose `capture_prefix` takes `nodes` nodes."""
        whole = small_specification(specification(self.access.team, name, nodes=nodes))
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(whole), encoding="utf-8")
        return path

    def images_file(self, name: str, images: Mapping[str, str]) -> Path:
        path = self.directory / f"{name}.images.json"
        path.write_text(json.dumps(dict(images)), encoding="utf-8")
        return path

    def start(self, name: str, *, transactions: int, images: Mapping[str, str]) -> ClusterRun:
        return self.submit(self.specification(name), images, transactions)

    def submit(self, spec: Path, images: Mapping[str, str], transactions: int = 1) -> ClusterRun:
        """`longstraw submit` with the team's own account."""
        lock = self.images_file(spec.stem, images)
        done = self.access.longstraw(
            *("submit", str(spec), "--images", str(lock), "--transactions", str(transactions), "-o", "json"),
            *("--endpoint", self.access.kubeflow, "--service-account", self.access.team.account),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return ClusterRun(self.access, json.loads(done.stdout.splitlines()[-1])["run_id"])

    def compile(self, name: str) -> Path:
        """Compile the small specification as for an upload by hand."""
        out = self.directory / f"{name}.pipeline.yaml"
        lock = self.images_file(name, self.images())
        done = self.access.longstraw("compile", str(self.specification(name)), "--images", str(lock), "--out", str(out))
        assert done.returncode == 0, done.stdout + done.stderr
        return out

    def upload_in_the_ui(self, name: str) -> ClusterRun:
        """What the UI's two forms do: upload the file as a pipeline, then create a run of its only version."""
        return ClusterRun(self.access, upload_and_run(self.access.kubeflow, self.compile(name), name))

    def kfp_run_create(self, name: str) -> ClusterRun:
        """The stock command."""
        return ClusterRun(self.access, stock_command(self.access.kubeflow, self.compile(name), name, self.directory))


def upload_and_run(endpoint: str, pipeline: Path, name: str) -> str:
    """Upload a compiled pipeline over the UI's API and start a run with every parameter's default; return its id."""
    pool = urllib3.PoolManager()

    def ask(method: str, path: str, **content: Any) -> dict[str, Any]:
        answer = pool.request(method, f"{endpoint}/apis/v2beta1/{path}", timeout=_HTTP_SECONDS, **content)
        assert answer.status == 200, f"{method} {path}: {answer.status} {answer.data[:500]!r}"
        return answer.json()

    form = {"uploadfile": (pipeline.name, pipeline.read_bytes(), "application/x-yaml")}
    identity = ask("POST", f"pipelines/upload?name={urllib.parse.quote(name)}", fields=form)["pipeline_id"]
    (version,) = ask("GET", f"pipelines/{identity}/versions")["pipeline_versions"]
    experiment = ask("POST", "experiments", json={"display_name": name})
    body = {
        "display_name": name,
        "experiment_id": experiment["experiment_id"],
        "pipeline_version_reference": {
            "pipeline_id": identity,
            "pipeline_version_id": version["pipeline_version_id"],
        },
        "runtime_config": {"parameters": {}},
    }
    return ask("POST", "runs", json=body)["run_id"]


def stock_command(endpoint: str, pipeline: Path, name: str, home: Path) -> str:
    """Start a run with `kfp run create`, whose exit code says nothing about the run; return the run's id."""
    command = [str(Path(sys.executable).with_name("kfp")), "--endpoint", endpoint, "run", "create"]
    said = run(*command, "-e", name, "-r", name, "-f", str(pipeline), environment={"HOME": str(home)})
    found = _RUN_ADDRESS.findall(said)
    assert found, said
    return found[-1]

"""Makes the cluster of the tests and takes it away: kind, a registry, SeaweedFS, two teams with KFP and the chart."""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml

from tests.e2e.cluster import images, manifests, upstream
from tests.e2e.cluster.driver import Access
from tests.e2e.cluster.manifests import CLUSTER, Team
from tests.e2e.cluster.tools import SetupError, run
from tests.e2e.containers.engine import push_base_image
from tests.e2e.expectations import ROOT, small_specification
from tests.servers.ports import free_port, wait_until_listening

UPSTREAM = ROOT / "build" / "e2e-upstream"
REGISTRY = f"{CLUSTER}-registry"
HELM = ROOT / ".tools" / "helm"
KEEP = "LONGSTRAW_E2E_KEEP"
"""Optional: leave the cluster and the registry, to look at what went wrong."""
ADMINISTRATOR = "administrator"
READY = "10m"


@dataclass(frozen=True)
class Site:
    """What the tests run against."""

    teams: dict[str, Access]
    lock: Path


@contextmanager
def cluster_site(directory: Path, snapshot: Path, rows: Path) -> Iterator[Site]:
    """Yield a cluster with two teams that are ready for runs; everything of it is removed at the end.

    Raises:
        SetupError: one step failed; the message names it.
    """
    pinned = images.load_lock()
    upstream.fetch(upstream.repositories(), UPSTREAM)
    upstream.verify(UPSTREAM)
    teams = [Team(name, secrets.token_hex(20)) for name in ("search", "law")]
    administrator_key = secrets.token_hex(20)
    kubeconfig = directory / "kubeconfig"
    data = directory / "data"
    data.mkdir()
    shutil.copytree(snapshot, data / "model")
    shutil.copyfile(rows, data / "rows.jsonl")
    _open_to_all(directory)

    with ExitStack() as stack:
        host = stack.enter_context(_registry(pinned[images.REGISTRY]))
        stack.enter_context(_kind(directory, kubeconfig, images.NODE, data))
        _let_nodes_pull_from(host)
        lock = _build_images(directory, host)
        _advertise_accelerators(kubeconfig)
        stored = manifests.storage_objects(teams, ADMINISTRATOR, administrator_key)
        apply(kubeconfig, images.with_digests(stored, pinned))
        apply(kubeconfig, upstream.render(UPSTREAM, None))
        _wait_for_deployments(kubeconfig, manifests.STORAGE_NAMESPACE)
        storage = stack.enter_context(
            forwarded(kubeconfig, manifests.STORAGE_NAMESPACE, "seaweedfs", manifests.STORAGE_PORT)
        )
        _make_bucket(storage, administrator_key)
        locked = json.loads(lock.read_text(encoding="utf-8"))
        accesses = {}
        for team in teams:
            apply(kubeconfig, manifests.team_objects(team))
            kubeflow = manifests.kubeflow_for(team, upstream.render(UPSTREAM, team.namespace))
            apply(kubeconfig, images.with_digests(kubeflow, pinned))
            _wait_for_deployments(kubeconfig, team.namespace)
            transaction = small_specification(manifests.specification(team, "registered"))
            install_chart(kubeconfig, team, manifests.chart_values(team, locked, transaction), directory)
            address = stack.enter_context(forwarded(kubeconfig, team.namespace, "ml-pipeline-ui", 80))
            accesses[team.name] = Access(kubeconfig, team, address, storage)
        yield Site(accesses, lock)


def apply(kubeconfig: Path, objects: list[dict[str, Any]]) -> None:
    """Apply objects; on the server's side, because Argo's definitions are too large for an annotation."""
    command = ("kubectl", "--kubeconfig", str(kubeconfig), "apply", "--server-side", "--force-conflicts")
    run(*command, "--filename", "-", given=yaml.safe_dump_all(objects))


def install_chart(kubeconfig: Path, team: Team, values: Mapping[str, Any], directory: Path) -> None:
    """Install a team's release and wait for its hook, which registers the pipeline."""
    path = directory / f"{team.name}.values.yaml"
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    run(
        *(str(HELM), "install", team.name, str(ROOT / "charts" / "longstraw")),
        *("--kubeconfig", str(kubeconfig), "--namespace", team.namespace),
        *("--values", str(path), "--wait", "--timeout", READY),
    )


@contextmanager
def forwarded(kubeconfig: Path, namespace: str, service: str, port: int) -> Iterator[str]:
    """Yield the address on this machine at which a service of the cluster answers.

    A forwarded connection enters the pod's own network, so the team's network policy does not stop it.
    """
    local = free_port()
    command = ["kubectl", "--kubeconfig", str(kubeconfig), "--namespace", namespace, "port-forward"]
    process = subprocess.Popen([*command, f"service/{service}", f"{local}:{port}"], stdout=subprocess.DEVNULL)
    try:
        wait_until_listening(local)
        yield f"http://127.0.0.1:{local}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _registry(image: str) -> Iterator[str]:
    """Yield `127.0.0.1:port`, where this machine pushes; on kind's network it is the container's own name."""
    port = free_port()
    run("docker", "run", "--detach", "--name", REGISTRY, "--publish", f"127.0.0.1:{port}:5000", image)
    try:
        wait_until_listening(port)
        yield f"127.0.0.1:{port}"
    finally:
        if not os.environ.get(KEEP):
            run("docker", "rm", "--force", "--volumes", REGISTRY)


@contextmanager
def _kind(directory: Path, kubeconfig: Path, node_image: str, data: Path) -> Iterator[None]:
    configuration = directory / "kind.yaml"
    configuration.write_text(manifests.kind_configuration(node_image, data), encoding="utf-8")
    try:
        run(
            *("kind", "create", "cluster", "--name", CLUSTER, "--config", str(configuration)),
            *("--kubeconfig", str(kubeconfig), "--wait", "5m"),
        )
        yield
    finally:
        if not os.environ.get(KEEP):
            run("kind", "delete", "cluster", "--name", CLUSTER, "--kubeconfig", str(kubeconfig))


def _nodes() -> list[str]:
    return run("kind", "get", "nodes", "--name", CLUSTER).split()


def _let_nodes_pull_from(host: str) -> None:
    """Let `host`, an address of this machine, mean the registry's container on every node."""
    run("docker", "network", "connect", "kind", REGISTRY)
    directory = f"/etc/containerd/certs.d/{host}"
    for node in _nodes():
        run("docker", "exec", node, "mkdir", "-p", directory)
        hosts = manifests.registry_hosts(f"{REGISTRY}:5000")
        run("docker", "exec", "--interactive", node, "cp", "/dev/stdin", f"{directory}/hosts.toml", given=hosts)


def _advertise_accelerators(kubeconfig: Path) -> None:
    for node in _nodes():
        command = ("kubectl", "--kubeconfig", str(kubeconfig), "patch", "node", node, "--subresource=status")
        run(*command, "--type=json", "--patch", manifests.accelerator_patch())


def _build_images(directory: Path, host: str) -> Path:
    lock = directory / "images.lock.json"
    base = push_base_image(directory, host)
    run(
        *(sys.executable, "images/build.py", "--registry", f"{host}/longstraw", "--insecure-registry"),
        *("--variant", "cpu", "--base", base, "--lock", str(lock), "--bills", str(directory / "sbom")),
        *("--allow-changes", "--without-server"),
    )
    return lock


def _make_bucket(storage: str, secret_key: str) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=storage,
        aws_access_key_id=ADMINISTRATOR,
        aws_secret_access_key=secret_key,
        region_name=manifests.REGION,
    )
    client.create_bucket(Bucket=manifests.BUCKET)


def _wait_for_deployments(kubeconfig: Path, namespace: str) -> None:
    place = ("--kubeconfig", str(kubeconfig), "--namespace", namespace)
    run("kubectl", *place, "wait", "deployments", "--all", "--for=condition=Available", f"--timeout={READY}")


def _open_to_all(directory: Path) -> None:
    """Let pods, whose user is not root, read what nodes mount, and reach it."""
    for path in (directory, *directory.rglob("*"), *directory.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))


def require_helm() -> None:
    """Refuse to begin without the pinned Helm."""
    if not HELM.exists():
        raise SetupError(f"{HELM} is missing: `make e2e-kind` fetches it")

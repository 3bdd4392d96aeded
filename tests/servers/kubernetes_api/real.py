"""The real thing: etcd, kube-apiserver, kube-controller-manager and kube-scheduler from `KUBEBUILDER_ASSETS`.

Nodes are objects only; the tests' kubelet plays them, and serves their logs where the API server asks for them.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import urllib3
import yaml

from longstraw_core.cluster.permissions import PERMISSIONS, role_rules
from tests.servers.kubernetes_api.certificate import make_certificate
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.http_server import ADMINISTRATOR, LAUNCHER
from tests.servers.kubernetes_api.kubelet import Kubelet, LogStore, eventually
from tests.servers.kubernetes_api.log_server import log_server
from tests.servers.kubernetes_api.proxy import Proxy
from tests.servers.ports import free_port

API_BINARIES = ("etcd", "kube-apiserver")
CONTROLLER_BINARIES = ("kube-controller-manager", "kube-scheduler")
ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
READY_SECONDS = 120.0


class Unusable(Exception):
    """The real servers were asked for and cannot run."""


def assets_directory() -> Path | None:
    """Where the binaries are said to be; None when nobody says."""
    directory = os.environ.get(ASSETS_VARIABLE)
    return Path(directory).resolve() if directory else None


def require_binaries(directory: Path, names: tuple[str, ...]) -> None:
    """Refuse a directory without the named programs: who sets the variable wants the real servers.

    Raises:
        Unusable: with the names of what is missing.
    """
    missing = [name for name in names if shutil.which(name, path=str(directory)) is None]
    if missing:
        raise Unusable(f"{ASSETS_VARIABLE}={directory} has no executable {', '.join(missing)}")


@dataclass
class ControlPlane:
    """Running servers."""

    url: str
    certificate: Path
    logs: LogStore
    kubelet_port: int
    controllers: bool
    """Whether controller manager and scheduler run too; the usual archives for envtest do not have them."""


@dataclass
class _Servers:
    """Processes with their logs, ended in the opposite order."""

    assets: Path
    directory: Path
    stack: contextlib.ExitStack
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> None:
        log = self.stack.enter_context((self.directory / f"{name}.log").open("wb"))
        command = [str(self.assets / name), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        self.running[name] = process

    def wait_until_ready(self, name: str, url: str, certificate: Path) -> None:
        """Wait until a server says that it is ready.

        Raises:
            Unusable: it, or one before it, has ended, or it takes too long; with the last lines of its log.
        """
        headers = {"Authorization": f"Bearer {ADMINISTRATOR}"}
        deadline = time.monotonic() + READY_SECONDS
        with urllib3.PoolManager(ca_certs=str(certificate), headers=headers, timeout=5.0, retries=False) as pool:
            while True:
                with contextlib.suppress(urllib3.exceptions.HTTPError):
                    if pool.request("GET", url).status == 200:
                        return
                for other, process in self.running.items():
                    if process.poll() is not None:
                        raise Unusable(f"{other} ended with status {process.returncode}: {self._last_words(other)}")
                if time.monotonic() > deadline:
                    raise Unusable(f"{name} is not ready: {self._last_words(name)}")
                time.sleep(0.2)

    def _last_words(self, name: str) -> str:
        lines = (self.directory / f"{name}.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-5:]) or "its log is empty"


@contextmanager
def control_plane() -> Iterator[ControlPlane]:
    """Start etcd and API server, and controller manager and scheduler where they are; stop them at the end.

    Raises:
        Unusable: a program is missing, or does not become ready.
    """
    assets = assets_directory()
    if assets is None:
        raise Unusable(f"{ASSETS_VARIABLE} is not set")
    require_binaries(assets, API_BINARIES)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-plane-")))
        certificate, key = make_certificate(directory)
        etcd_port, peer_port, api_port = free_port(), free_port(), free_port()
        (directory / "tokens.csv").write_text(
            f"{ADMINISTRATOR},administrator,administrator,system:masters\n{LAUNCHER},launcher,launcher\n"
        )
        url = f"https://127.0.0.1:{api_port}"
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(url, certificate))
        logs = LogStore()
        kubelet_port = stack.enter_context(log_server(logs, certificate, key))
        servers = _Servers(assets, directory, stack)
        tls = (f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}")

        servers.start(
            "etcd",
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )
        servers.start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            # without it the server looks for a default route, which an isolated machine does not have
            "--advertise-address=127.0.0.1",
            f"--cert-dir={directory / 'apiserver'}",
            f"--secure-port={api_port}",
            *tls,
            f"--token-auth-file={directory / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            # the log server shows the same certificate
            f"--kubelet-certificate-authority={certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        servers.wait_until_ready("kube-apiserver", f"{url}/readyz", certificate)
        controllers = all(shutil.which(name, path=str(assets)) for name in CONTROLLER_BINARIES)
        if controllers:
            _start_controllers(servers, kubeconfig, certificate, tls)
        yield ControlPlane(url, certificate, logs, kubelet_port, controllers)


def _start_controllers(servers: _Servers, kubeconfig: Path, certificate: Path, tls: tuple[str, str]) -> None:
    own = {
        "kube-controller-manager": (
            "--controllers=job-controller,garbage-collector-controller,ttl-after-finished-controller,"
            "resourcequota-controller,namespace-controller",
        ),
        "kube-scheduler": (),
    }
    ports = {name: free_port() for name in own}
    for name, arguments in own.items():
        servers.start(
            name,
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports[name]}",
            *tls,
            *arguments,
        )
    for name, port in ports.items():
        servers.wait_until_ready(name, f"https://127.0.0.1:{port}/healthz", certificate)


@contextmanager
def real_cluster(plane: ControlPlane) -> Iterator[Cluster]:
    """A namespace of its own in the running control plane, with the launcher's role in it."""
    namespace = f"team-{uuid.uuid4().hex[:8]}"
    parts = urlsplit(plane.url)
    proxy = Proxy((str(parts.hostname), int(parts.port or 0)))
    kubelet = _PlayedKubelet(
        plane.url,
        {"Authorization": f"Bearer {ADMINISTRATOR}"},
        plane.logs,
        namespace,
        urllib3.PoolManager(maxsize=8, ca_certs=str(plane.certificate)),
    )
    kubelet.port = plane.kubelet_port
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    kubelet.request(
        "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    )
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "launcher"}}
    kubelet.request("POST", f"{rbac}/roles", {**role, "kind": "Role", "rules": role_rules()})
    kubelet.request(
        "POST",
        f"{rbac}/rolebindings",
        {
            **role,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "launcher"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "launcher"}],
        },
    )
    cluster = Cluster("real", plane.url, namespace, kubelet, proxy, certificate=plane.certificate)
    eventually(lambda: _allowed(cluster), "the API server knows the launcher's role")
    kubelet.run_in_background()
    try:
        yield cluster
    finally:
        for node in kubelet.request("GET", "/api/v1/nodes")["items"]:
            if node["metadata"]["name"].startswith(namespace):
                kubelet.request("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")
        kubelet.request("DELETE", f"/api/v1/namespaces/{namespace}")
        kubelet.stop()
        proxy.close()


def _allowed(cluster: Cluster) -> bool:
    """Whether every right of the launcher is in force: the server learns of a new role a moment after it is stored."""
    for permission in PERMISSIONS:
        resource, _, subresource = permission.resource.partition("/")
        attributes = {
            "namespace": cluster.namespace,
            "group": permission.group,
            "resource": resource,
            "subresource": subresource,
            "verb": permission.verb,
        }
        answer = cluster.kubelet.request(
            "POST",
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            },
            Authorization=f"Bearer {LAUNCHER}",
        )
        if not answer["status"]["allowed"]:
            return False
    return True


class _PlayedKubelet(Kubelet):
    """Its nodes say where their logs are."""

    port = 0

    def add_nodes(self, count: int, *, gpus: int = 8, first: int = 0) -> None:
        super().add_nodes(count, gpus=gpus, first=first)
        for number in range(first, first + count):
            self.request(
                "PATCH",
                f"/api/v1/nodes/{self.namespace}-node-{number}/status",
                {
                    "status": {
                        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                        "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
                    }
                },
                **{"Content-Type": "application/merge-patch+json"},
            )


def _kubeconfig(url: str, certificate: Path) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(certificate)}}],
            "users": [{"name": "administrator", "user": {"token": ADMINISTRATOR}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "administrator"}}],
        }
    )

"""The real thing: etcd, kube-apiserver, kube-controller-manager and kube-scheduler from `KUBEBUILDER_ASSETS`.

Nodes are objects only; the tests' kubelet plays them, and serves their logs where the API server asks for them.
"""

import contextlib
import datetime
import http.server
import ipaddress
import os
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import urllib3
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from longstraw_core.cluster.permissions import role_rules
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.http_server import ADMINISTRATOR, LAUNCHER
from tests.servers.kubernetes_api.kubelet import Kubelet, LogStore
from tests.servers.kubernetes_api.proxy import Proxy
from tests.servers.ports import free_port

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"


def missing_binaries() -> str | None:
    """Why the real servers cannot run here, None when they can."""
    directory = os.environ.get(ASSETS_VARIABLE)
    if not directory:
        return f"{ASSETS_VARIABLE} is not set"
    missing = [name for name in BINARIES if shutil.which(name, path=directory) is None]
    return f"{directory} has no {', '.join(missing)}" if missing else None


@dataclass
class ControlPlane:
    """Running servers."""

    url: str
    certificate: Path
    logs: LogStore
    kubelet_port: int


@contextmanager
def control_plane() -> Iterator[ControlPlane]:
    """Start the four servers with their data in a temporary directory; stop them at the end."""
    assets = Path(os.environ[ASSETS_VARIABLE])
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-plane-")))
        certificate, key = _certificate(directory)
        etcd_port, peer_port, api_port = free_port(), free_port(), free_port()
        (directory / "tokens.csv").write_text(
            f"{ADMINISTRATOR},administrator,administrator,system:masters\n{LAUNCHER},launcher,launcher\n"
        )
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(f"https://127.0.0.1:{api_port}", certificate))
        logs = LogStore()
        kubelet_port = stack.enter_context(_log_server(logs, certificate, key))

        def start(name: str, *arguments: str) -> None:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            process = subprocess.Popen([str(assets / name), *arguments], stdout=log, stderr=log, cwd=directory)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start(
            "etcd",
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={directory / 'apiserver'}",
            f"--secure-port={api_port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={directory / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            # the log server below shows the same certificate
            f"--kubelet-certificate-authority={certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        url = f"https://127.0.0.1:{api_port}"
        _wait_until_ready(url, certificate)
        common = (f"--kubeconfig={kubeconfig}", "--leader-elect=false")
        start(
            "kube-controller-manager",
            *common,
            "--controllers=job-controller,garbage-collector-controller,ttl-after-finished-controller,"
            "resourcequota-controller,namespace-controller",
            f"--secure-port={free_port()}",
            f"--cert-dir={directory / 'controllers'}",
        )
        start("kube-scheduler", *common, f"--secure-port={free_port()}", f"--cert-dir={directory / 'scheduler'}")
        yield ControlPlane(url, certificate, logs, kubelet_port)


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
    kubelet.run_in_background()
    try:
        yield Cluster("real", plane.url, namespace, kubelet, proxy, certificate=plane.certificate)
    finally:
        for node in kubelet.request("GET", "/api/v1/nodes")["items"]:
            if node["metadata"]["name"].startswith(namespace):
                kubelet.request("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")
        kubelet.request("DELETE", f"/api/v1/namespaces/{namespace}")
        kubelet.stop()
        proxy.close()


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


@contextmanager
def _log_server(logs: LogStore, certificate: Path, key: Path) -> Iterator[int]:
    """Serve `/containerLogs/<namespace>/<pod>/<container>` as a kubelet does."""
    stopping = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in logs.lines(
                parts.path.split("/")[3],
                follow=query.get("follow") == "true",
                timestamps=query.get("timestamps") == "true",
                tail=int(query["tailLines"]) if "tailLines" in query else None,
                stopping=stopping,
            ):
                content = line.encode() + b"\n"
                self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()


def _wait_until_ready(url: str, certificate: Path, *, seconds: float = 120.0) -> None:
    pool = urllib3.PoolManager(ca_certs=str(certificate))
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = pool.request(
                "GET", f"{url}/readyz", headers={"Authorization": f"Bearer {ADMINISTRATOR}"}, timeout=5.0, retries=False
            )
            if answer.status == 200:
                return
        except urllib3.exceptions.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError("kube-apiserver is not ready; see its log")
        time.sleep(0.3)


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


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "tls.crt", directory / "tls.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    return paths

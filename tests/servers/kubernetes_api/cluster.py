"""One test's cluster: a namespace of the fake or of the real server, seen through a proxy, with a kubelet to play."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import urllib3
import yaml
from kubernetes import client

from longstraw_core.cluster.api import ClusterApi, Patience, make_client
from longstraw_core.cluster.permissions import role_rules
from tests.servers.kubernetes_api.http_server import ADMINISTRATOR, LAUNCHER, FakeServer, serving
from tests.servers.kubernetes_api.kubelet import Kubelet, LogStore, eventually
from tests.servers.kubernetes_api.proxy import Proxy

QUICK = Patience(request_seconds=5.0, outage_seconds=20.0, rollback_seconds=3.0, watch_seconds=30.0, pause_seconds=0.1)


@dataclass
class Cluster:
    """What a test can do to a cluster and ask of it."""

    kind: Literal["fake", "real"]
    url: str
    """The server itself; `proxy` is what the launcher sees."""
    namespace: str
    kubelet: Kubelet
    proxy: Proxy
    certificate: Path | None = None
    fake: FakeServer | None = None

    @property
    def launcher_url(self) -> str:
        return f"{urlsplit(self.url).scheme}://127.0.0.1:{self.proxy.port}"

    def api(self, patience: Patience = QUICK) -> ClusterApi:
        """The launcher's client, with the launcher's rights."""
        configuration = client.Configuration()
        configuration.host = self.launcher_url
        configuration.api_key = {"authorization": f"Bearer {LAUNCHER}"}
        configuration.ssl_ca_cert = None if self.certificate is None else str(self.certificate)
        return ClusterApi(make_client(configuration), self.namespace, patience)

    def kubeconfig(self, path: Path) -> Path:
        """A file with which the launcher's rights are used from outside of the cluster."""
        server: dict[str, object] = {"server": self.launcher_url}
        if self.certificate is not None:
            server["certificate-authority"] = str(self.certificate)
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": server}],
                    "users": [{"name": "launcher", "user": {"token": LAUNCHER}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "launcher"}}],
                }
            )
        )
        return path

    def jobs(self) -> list[dict]:
        return self.kubelet.request("GET", f"/apis/batch/v1/namespaces/{self.namespace}/jobs")["items"]

    def services(self) -> list[dict]:
        return self.kubelet.request("GET", f"/api/v1/namespaces/{self.namespace}/services")["items"]

    def held(self) -> list[str]:
        """Names of the Jobs, Services and worker pods that exist."""
        workers = [pod for pod in self.kubelet.all_pods() if pod["metadata"].get("labels", {}).get("longstraw.io/job")]
        return sorted(
            f"{kind} {item['metadata']['name']}"
            for kind, items in (("Job", self.jobs()), ("Service", self.services()), ("Pod", workers))
            for item in items
        )

    def create_quota(self, pods: int) -> None:
        self.kubelet.request(
            "POST",
            f"/api/v1/namespaces/{self.namespace}/resourcequotas",
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "team", "namespace": self.namespace},
                "spec": {"hard": {"pods": str(pods)}},
            },
        )
        if self.kind == "real":  # until its controller has counted, the real quota refuses every pod
            path = f"/api/v1/namespaces/{self.namespace}/resourcequotas/team"
            eventually(lambda: self.kubelet.request("GET", path).get("status", {}).get("hard"), "the quota has counted")


@contextmanager
def fake_cluster(namespace: str = "team") -> Iterator[Cluster]:
    """A fake of its own, with the launcher's rights and no more."""
    server = FakeServer(role_rules(), namespace, logs=LogStore())
    server.storage.namespaces = {namespace}
    with serving(server) as url:
        parts = urlsplit(url)
        proxy = Proxy((str(parts.hostname), int(parts.port or 0)))
        kubelet = Kubelet(
            url,
            {"Authorization": f"Bearer {ADMINISTRATOR}"},
            server.logs,
            namespace,
            urllib3.PoolManager(maxsize=8),
        )
        kubelet.run_in_background()
        try:
            yield Cluster("fake", url, namespace, kubelet, proxy, fake=server)
        finally:
            kubelet.stop()
            proxy.close()

"""What the cluster of the tests consists of, as plain objects: nothing here runs anything."""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.servers.seaweedfs import administrator, prefix_user

CLUSTER = "longstraw-e2e"
BUCKET = "longstraw"
STORAGE_NAMESPACE = "longstraw-storage"
STORAGE_IMAGE = "ghcr.io/chrislusf/seaweedfs:4.34"
STORAGE_ENDPOINT = f"http://seaweedfs.{STORAGE_NAMESPACE}:8333"
STORAGE_PORT = 8333
REGION = "us-east-1"
NODE_DATA, POD_DATA = "/longstraw-data", "/data"
DATA_CLAIM = "longstraw-data"
ACCELERATOR, ACCELERATORS = "nvidia.com/gpu", 4
WORKERS = 2
# Version 1's cache, viewers and notebooks' visualisations: no pipeline of version 2 uses them.
NOT_INSTALLED = frozenset(
    {"cache-deployer-deployment", "cache-server", "ml-pipeline-viewer-crd", "ml-pipeline-visualizationserver"}
)


@dataclass(frozen=True)
class Team:
    """A namespace with one release, one Kubeflow Pipelines, and credentials of the store for one prefix."""

    name: str
    secret_key: str

    @property
    def namespace(self) -> str:
        return f"team-{self.name}"

    @property
    def prefix(self) -> str:
        return f"teams/{self.name}"

    @property
    def store(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    @property
    def account(self) -> str:
        return f"longstraw-{self.name}"

    def keys(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": f"key-of-{self.name}", "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def identity(self) -> dict[str, object]:
        keys = self.keys()
        return prefix_user(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"], bucket=BUCKET, prefix=self.prefix)


def kind_configuration(node_image: str, data: Path) -> str:
    """Return kind's configuration: one control plane, workers for stages of several pods, and `data` on every node."""
    node = {
        "image": node_image,
        "extraMounts": [{"hostPath": str(data), "containerPath": NODE_DATA, "readOnly": True}],
    }
    configuration = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "name": CLUSTER,
        "nodes": [{"role": "control-plane", **node}, *({"role": "worker", **node} for _ in range(WORKERS))],
    }
    return yaml.safe_dump(configuration, sort_keys=False)


def registry_hosts(registry: str) -> str:
    """Return containerd's hosts.toml: on a node the name of the host's registry means this address."""
    return f'[host."http://{registry}"]\n  capabilities = ["pull", "resolve"]\n'


def accelerator_patch() -> str:
    """Return the JSON patch of a node's status with accelerators that do not exist; the kubelet offers them."""
    path = f"/status/capacity/{ACCELERATOR.replace('/', '~1')}"
    return json.dumps([{"op": "add", "path": path, "value": str(ACCELERATORS)}])


def storage_objects(teams: Iterable[Team], access_key: str, secret_key: str) -> list[dict[str, Any]]:
    """Return SeaweedFS with an administrator and one user per team, who gets no further than its prefix."""
    users = {"identities": [administrator(access_key, secret_key), *(team.identity() for team in teams)]}
    labels = {"app": "seaweedfs"}
    limits = {"master.volumeSizeLimitMB": 256, "volume.max": 200}
    container = {
        "name": "seaweedfs",
        "image": STORAGE_IMAGE,
        "args": [
            *("server", "-dir=/data", "-filer", "-s3", f"-s3.port={STORAGE_PORT}", "-s3.config=/etc/seaweedfs/s3.json"),
            *(f"-{name}={value}" for name, value in limits.items()),
        ],
        "ports": [{"containerPort": STORAGE_PORT}],
        "readinessProbe": {"httpGet": {"path": "/status", "port": STORAGE_PORT}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "users", "mountPath": "/etc/seaweedfs", "readOnly": True},
        ],
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "users", "secret": {"secretName": "users"}}],
    }
    place = {"namespace": STORAGE_NAMESPACE}
    return [
        _namespace(STORAGE_NAMESPACE),
        _secret("users", STORAGE_NAMESPACE, {"s3.json": json.dumps(users)}),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "seaweedfs", **place},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "seaweedfs", **place},
            "spec": {"selector": labels, "ports": [{"port": STORAGE_PORT}]},
        },
    ]


def team_objects(team: Team) -> list[dict[str, Any]]:
    """Return what a platform team makes besides the chart: namespace, secret, model and rows, and a role of KFP's.

    The chart's account may do what our launchers do. What KFP's own executor does in a pod (results for Argo, its
    configuration) is the role `pipeline-runner` of the installation, which has to be bound to the account too.
    """
    place = {"namespace": team.namespace}
    size = {"storage": "1Gi"}
    volume = f"{DATA_CLAIM}-{team.name}"
    return [
        _namespace(team.namespace),
        _secret("longstraw-store", team.namespace, team.keys()),
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "hostPath": {"path": NODE_DATA, "type": "Directory"},
                "claimRef": {"name": DATA_CLAIM, **place},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": DATA_CLAIM, **place},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "longstraw-pipeline-runner", **place},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pipeline-runner"},
            "subjects": [{"kind": "ServiceAccount", "name": team.account, **place}],
        },
    ]


def kubeflow_for(team: Team, rendered: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a team's Kubeflow Pipelines from the upstream objects that were rendered for its namespace.

    Two addresses that name the namespace `kubeflow` in text become the team's, and KFP's small artifacts go below the
    team's own prefix of the store, with the team's own credentials.
    """
    kept = [entry for entry in rendered if entry["metadata"]["name"] not in NOT_INSTALLED]
    text = json.dumps(kept).replace("seaweedfs.kubeflow", f"seaweedfs.{team.namespace}")
    objects: list[dict[str, Any]] = json.loads(text)
    for entry in objects:
        if (entry["kind"], entry["metadata"]["name"]) == ("ConfigMap", "kfp-launcher"):
            entry["data"] = {"defaultPipelineRoot": f"{team.store}/kfp", "providers": yaml.safe_dump(_providers())}
    return objects


def _providers() -> dict[str, Any]:
    names = {"accessKeyKey": "AWS_ACCESS_KEY_ID", "secretKeyKey": "AWS_SECRET_ACCESS_KEY"}
    credentials = {"fromEnv": False, "secretRef": {"secretName": "longstraw-store", **names}}
    server = {"endpoint": STORAGE_ENDPOINT.removeprefix("http://"), "disableSSL": True, "forcePathStyle": True}
    return {"s3": {"default": {**server, "region": REGION, "credentials": credentials}}}


def chart_values(team: Team, images: Mapping[str, str], transaction: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a team's release."""
    return {
        "team": team.name,
        "images": dict(images),
        "store": {"uri": team.store, "endpoint": STORAGE_ENDPOINT, "region": REGION, "pathStyle": "1"},
        "kfp": {"endpoint": f"http://ml-pipeline.{team.namespace}:8888"},
        "networkPolicy": {"egressNamespaces": [STORAGE_NAMESPACE]},
        "transaction": dict(transaction),
    }


def specification(team: Team, name: str, *, nodes: int = 1) -> dict[str, Any]:
    """Return the fields of a small transaction on this cluster: its pods ask for the accelerators that do not exist.

    `nodes` are those of `capture_prefix`, each with one rank.
    """
    small = {"cpu": "100m", "memory": "2Gi", "shared_memory": "64Mi", "scratch": "2Gi", "timeout_minutes": 20}
    return {
        "name": name,
        "model": {"snapshot": f"{POD_DATA}/model", "family": "qwen3_5_text", "dtype": "float32"},
        "data": {"path": f"{POD_DATA}/rows.jsonl"},
        "layout": {"context_parallel": nodes},
        "storage": {"uri": team.store},
        "cluster": {
            "stages": {"capture_prefix": {"nodes": nodes, "accelerators": 1}},
            "accelerator": ACCELERATOR,
            "volumes": [{"claim": DATA_CLAIM, "mount_path": POD_DATA}],
            "retries": {"count": 2, "backoff_seconds": 1},
            # so that an image that cannot be pulled ends the run within three attempts of four minutes
            "control": {**small, "timeout_minutes": 4},
            "trainer": {**small, "accelerators": 1},
            "sampler": {**small, "accelerators": 1},
        },
    }


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _secret(name: str, namespace: str, data: Mapping[str, str]) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "data": encoded,
    }

"""A specification that a cluster can run, an image lock, and a fake KFP installation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.kubeflow_api import KubeflowApi, kubeflow_api

LOCK = {
    role: f"registry.example/longstraw/{role}@sha256:{str(number) * 64}"
    for number, role in enumerate(("control", "trainer", "sampler"))
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "images.lock.json"
    path.write_text(json.dumps(LOCK))
    return path


@pytest.fixture
def cluster_fields() -> dict[str, Any]:
    return {
        "name": "demo",
        "model": {"snapshot": "/data/model", "family": "qwen3_5_text"},
        "data": {"path": "/data/rows.jsonl"},
        "storage": {"uri": "s3://bucket/team"},
        "cluster": {"volumes": [{"claim": "data", "mount_path": "/data"}]},
    }


@pytest.fixture
def cluster_spec(tmp_path: Path, cluster_fields: dict[str, Any]) -> Path:
    path = tmp_path / "transaction.yaml"
    path.write_text(json.dumps(cluster_fields))
    return path


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeflowApi]:
    for name in ("KFP_ENDPOINT", "KFP_NAMESPACE", "KFP_EXISTING_TOKEN", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with kubeflow_api() as server:
        yield server

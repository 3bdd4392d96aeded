"""`longstraw doctor`: every check, healthy and broken, against servers on loopback."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from longstraw_core.cli.main import main
from longstraw_core.cluster.permissions import PERMISSIONS
from longstraw_core.doctor.machine import check_collectives, differing_pins
from tests.servers.image_registry import ImageRegistry, image_registry
from tests.servers.kubeflow_api import KubeflowApi, kubeflow_api
from tests.servers.kubernetes_reads import KubernetesReads, kubernetes_reads
from tests.servers.seaweedfs import S3Server

ORDER = [
    *("packages", "store", "kubeflow", "permissions", "accelerators", "queue", "images", "snapshot"),
    *("collectives", "disk"),
]


@pytest.fixture(autouse=True)
def without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that import torch take seconds; one test runs them for real."""
    monkeypatch.setattr("longstraw_core.cli.commands.doctor.check_collectives", lambda scratch: "not run in this test")


@pytest.fixture
def cluster() -> Iterator[KubernetesReads]:
    with kubernetes_reads() as server:
        yield server


@pytest.fixture
def registry() -> Iterator[ImageRegistry]:
    with image_registry() as server:
        yield server


@pytest.fixture
def api() -> Iterator[KubeflowApi]:
    with kubeflow_api() as server:
        yield server


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *(str(argument) for argument in arguments)])


def findings(*arguments: object) -> dict[str, dict[str, Any]]:
    result = invoke(*arguments, "-o", "json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["check"] for line in lines] == ORDER
    failed = [line for line in lines if line["status"] == "failed"]
    assert result.exit_code == (2 if failed else 0)
    assert all(line["remedy"] for line in failed)
    return {line["check"]: line for line in lines}


def write_spec(path: Path, fields: dict[str, Any], **cluster: Any) -> Path:
    path.write_text(json.dumps({**fields, "cluster": cluster}))
    return path


def node(count: int, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "n", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": str(count)}}}


def test_without_anything_only_this_machine_is_checked(tmp_path: Path) -> None:
    found = findings("--directory", tmp_path, "--least-free-gb", "0.001")
    skipped = {name for name, finding in found.items() if finding["status"] == "skipped"}
    assert skipped == {"store", "kubeflow", "permissions", "accelerators", "queue", "images", "snapshot"}
    assert found["disk"]["status"] == "ok"


def test_every_check_runs_whatever_the_others_found(spec_file: Path, tmp_path: Path) -> None:
    found = findings(
        spec_file,
        *("--endpoint", "http://127.0.0.1:9", "--kubeconfig", tmp_path / "none", "--least-free-gb", "1e9"),
        *("--directory", tmp_path / "not" / "there" / "yet"),
    )
    assert {name for name, finding in found.items() if finding["status"] == "failed"} >= {
        *("kubeflow", "permissions", "accelerators", "disk")
    }
    assert found["store"]["status"] == "ok"
    assert found["snapshot"]["status"] == "ok"
    table = invoke(spec_file, "--least-free-gb", "1e9")
    assert table.exit_code == 2
    assert "free space" in table.stdout


def test_a_pinned_package_in_another_version_is_named() -> None:
    installed = metadata.version("click")
    requirements = [f"click=={installed}", "click==0.0.1", "pytest>=1", "no-such-package==1"]
    optional = ['no-such-package==1; extra == "trainer"', 'click==0.0.2; extra == "trainer"']
    assert [text.split(",")[0] for text in differing_pins(requirements + optional)] == [
        f"click is {installed}",
        "no-such-package is missing",
        f"click is {installed}",
    ]


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.17.0", "ok"),
        ("2.18.1", "ok"),
        ("v3.0.0", "ok"),
        ("2.16.9", "failed"),
        ("master", "failed"),
        (None, "failed"),
    ],
)
def test_a_server_older_than_the_sdk_is_found(api: KubeflowApi, version: str | None, status: str) -> None:
    api.version = version
    assert findings("--endpoint", api.endpoint)["kubeflow"]["status"] == status


def test_exactly_the_verbs_that_are_used_are_asked_for(cluster: KubernetesReads, tmp_path: Path) -> None:
    config = cluster.kubeconfig(tmp_path / "config")
    assert findings("--kubeconfig", config)["permissions"]["status"] == "ok"
    needed = {(entry.group, entry.resource, entry.verb) for entry in PERMISSIONS if not entry.optional}
    assert set(cluster.reviews) == needed
    assert len(cluster.reviews) == len(needed)
    cluster.denied = {("", "pods/log", "get")}
    found = findings("--kubeconfig", config)["permissions"]
    assert found["status"] == "failed"
    assert "get pods/log" in found["found"]
    assert "list pods" not in found["found"]


def test_a_node_must_have_as_many_accelerators_as_one_pod_asks_for(
    cluster: KubernetesReads, spec_fields: dict[str, Any], tmp_path: Path
) -> None:
    config = cluster.kubeconfig(tmp_path / "config")
    spec = write_spec(tmp_path / "s.json", spec_fields, trainer={"accelerators": 8}, node_selector={"pool": "a"})
    cluster.nodes = [node(4, pool="a"), node(4, pool="a"), node(8, pool="b")]
    found = findings(spec, "--kubeconfig", config)["accelerators"]
    assert found["status"] == "failed"
    assert "a pod asks for 8, the largest of 2 selected nodes has 4" in found["found"]
    cluster.nodes.append(node(8, pool="a"))
    assert findings(spec, "--kubeconfig", config)["accelerators"]["status"] == "ok"
    none = write_spec(tmp_path / "c.json", spec_fields, trainer={"accelerators": 0}, sampler={"accelerators": 0})
    assert findings(none, "--kubeconfig", config)["accelerators"]["status"] == "skipped"


def test_the_queue_must_be_there_and_active(
    cluster: KubernetesReads, spec_fields: dict[str, Any], tmp_path: Path
) -> None:
    config = cluster.kubeconfig(tmp_path / "config")
    spec = write_spec(tmp_path / "s.json", spec_fields, queue="gpus")
    assert findings(spec, "--kubeconfig", config)["queue"]["status"] == "failed"
    condition = {"type": "Active", "status": "False", "message": "no cluster queue"}
    cluster.queues["gpus"] = {"status": {"conditions": [condition], "pendingWorkloads": 3}}
    assert "no cluster queue" in findings(spec, "--kubeconfig", config)["queue"]["found"]
    condition["status"] = "True"
    assert "3 workloads" in findings(spec, "--kubeconfig", config)["queue"]["found"]


def test_images_are_asked_for_by_digest_only_on_request(registry: ImageRegistry, tmp_path: Path) -> None:
    digests = {role: "sha256:" + str(number) * 64 for number, role in enumerate(("control", "trainer", "sampler"))}
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({role: f"{registry.host}/team/{role}@{digest}" for role, digest in digests.items()}))
    assert findings("--images", lock)["images"]["status"] == "skipped"
    assert registry.asked == []
    registry.images = {f"team/{role}@{digest}": digest for role, digest in digests.items()}
    registry.needs_token = True
    assert findings("--images", lock, "--check-images")["images"]["status"] == "ok"

    registry.gives_tokens = False
    assert "anonymous pulls are refused" in findings("--images", lock, "--check-images")["images"]["found"]
    registry.needs_token = False
    registry.images[f"team/trainer@{digests['trainer']}"] = "sha256:" + "f" * 64
    del registry.images[f"team/sampler@{digests['sampler']}"]
    found = findings("--images", lock, "--check-images")["images"]["found"]
    assert "answers with sha256:ffff" in found
    assert "team/sampler" in found
    assert "has no such digest" in found
    assert "team/control" not in found


def test_a_store_must_enforce_conditional_writes(
    seaweedfs_server: S3Server, spec_fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in seaweedfs_server.environment().items():
        monkeypatch.setenv(name, value)
    fields = {**spec_fields, "storage": {"uri": "s3://artifacts/doctor"}}
    spec = write_spec(tmp_path / "s.json", fields)
    assert findings(spec)["store"]["status"] == "ok"
    listed = seaweedfs_server.client().list_objects_v2(Bucket="artifacts", Prefix="doctor/")
    assert "Contents" not in listed  # nothing stays behind
    monkeypatch.setattr("longstraw_core.artifacts.s3_conditions.put_once", lambda *_: True)  # a server that ignores it
    assert "If-None-Match" in findings(spec)["store"]["found"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert findings(spec)["store"]["status"] == "failed"


def test_a_snapshot_that_is_not_whole_is_found(spec_fields: dict[str, Any], tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "s.json", {**spec_fields, "model": {**spec_fields["model"], "snapshot": "nothing"}})
    assert "is not a directory" in findings(spec)["snapshot"]["found"]
    on_volume = {**spec_fields, "model": {**spec_fields["model"], "snapshot": "/data/model"}}
    remote = write_spec(tmp_path / "r.json", on_volume, volumes=[{"claim": "c", "mount_path": "/data"}])
    assert findings(remote)["snapshot"]["status"] == "skipped"


def test_a_layout_that_the_model_cannot_be_divided_by_is_found(spec_fields: dict[str, Any], tmp_path: Path) -> None:
    layout = {**spec_fields["layout"], "context_parallel": 3}
    spec = write_spec(tmp_path / "s.json", {**spec_fields, "layout": layout})
    assert "layout.context_parallel: 3 does not divide" in findings(spec)["snapshot"]["found"]


def test_two_processes_agree_over_gloo(tmp_path: Path) -> None:
    assert "gloo: 2 processes agree" in check_collectives(tmp_path)


def test_an_account_that_may_not_look_at_nodes_and_queues_lacks_nothing(
    cluster: KubernetesReads, spec_fields: dict[str, Any], tmp_path: Path
) -> None:
    config = cluster.kubeconfig(tmp_path / "config")
    cluster.denied = {("", "nodes", "list"), ("kueue.x-k8s.io", "localqueues", "get")}
    found = findings(write_spec(tmp_path / "s.json", spec_fields, queue="gpus"), "--kubeconfig", config)
    assert (found["accelerators"]["status"], found["queue"]["status"]) == ("skipped", "skipped")
    assert "403" in found["accelerators"]["found"]

"""What makes the cluster of the tests, without a cluster: configuration, manifests, digests, commands and refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import HELM, helm
from tests.charts.test_chart import KUBERNETES, validate
from tests.e2e import expectations
from tests.e2e.cluster import images, manifests, site
from tests.e2e.cluster.driver import KILL_ALL, Access, ClusterDriver, stock_command, upload_and_run
from tests.e2e.cluster.tools import TOOLS, SetupError, missing_tools, run
from tests.servers.kubeflow_api import KubeflowApi, kubeflow_api
from tests.servers.seaweedfs import seaweedfs
from tests.support.fake_tools import calls, fake

SEARCH, LAW = manifests.Team("search", "s" * 40), manifests.Team("law", "l" * 40)
DIGEST = "sha256:" + "d" * 64
LOCK = {
    role: f"127.0.0.1:5001/longstraw/{role}@sha256:{str(n) * 64}"
    for n, role in enumerate(("control", "trainer", "sampler"))
}


def test_a_missing_tool_is_named_in_one_line(tools: Path) -> None:
    for name in TOOLS:
        if name != "kind":
            fake(tools, name)
    found = missing_tools()
    assert found is not None
    assert "kind (" in found
    assert "\n" not in found
    fake(tools, "kind")
    assert missing_tools() is None
    with pytest.raises(SetupError, match="nothing-of-the-kind is missing"):
        run("nothing-of-the-kind")
    fake(tools, "kubectl", "first\nthe last word\n", status=3)
    with pytest.raises(SetupError, match="exited with 3: the last word"):
        run("kubectl", "version")


def test_the_tests_are_refused_by_name_before_anything_is_made(tmp_path: Path) -> None:
    environment = {"LONGSTRAW_E2E_CLUSTER": "1", "PATH": str(tmp_path), "PYTHONPATH": str(expectations.ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/e2e/cluster/test_cluster.py"],
        capture_output=True,
        text=True,
        cwd=expectations.ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip().splitlines()[0].startswith("ERROR: missing: kind (")


# What kind's own decoder takes; it refuses any other field.
KIND_FIELDS = {
    "kind",
    "apiVersion",
    "name",
    "nodes",
    "networking",
    "featureGates",
    "runtimeConfig",
    "kubeadmConfigPatches",
    "kubeadmConfigPatchesJSON6902",
    "containerdConfigPatches",
    "containerdConfigPatchesJSON6902",
}
NODE_FIELDS = {
    "role",
    "image",
    "labels",
    "extraMounts",
    "extraPortMappings",
    "kubeadmConfigPatches",
    "kubeadmConfigPatchesJSON6902",
}


def test_kinds_configuration_has_its_fields_and_a_node_for_every_pod_of_a_stage(tmp_path: Path) -> None:
    configuration = yaml.safe_load(manifests.kind_configuration(images.NODE, tmp_path))
    assert set(configuration) <= KIND_FIELDS
    assert (configuration["kind"], configuration["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    nodes = configuration["nodes"]
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker"]
    for node in nodes:
        assert set(node) <= NODE_FIELDS
        assert re.fullmatch(r"kindest/node:v1\.\d+\.\d+@sha256:[0-9a-f]{64}", node["image"])
        assert node["extraMounts"] == [
            {"hostPath": str(tmp_path), "containerPath": manifests.NODE_DATA, "readOnly": True}
        ]


def test_accelerators_are_a_patch_of_the_status() -> None:
    (operation,) = json.loads(manifests.accelerator_patch())
    assert operation == {"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "4"}


def test_our_own_objects_are_valid_and_nothing_of_one_team_is_in_anothers(tmp_path: Path) -> None:
    path = tmp_path / "objects.yaml"
    stored = manifests.storage_objects([SEARCH, LAW], "administrator", "a" * 40)
    objects = [*stored, *manifests.team_objects(SEARCH), *manifests.team_objects(LAW)]
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    validate(path, [KUBERNETES[0], KUBERNETES[-1]])
    search, law = manifests.team_objects(SEARCH), manifests.team_objects(LAW)
    for own, other in ((search, LAW), (law, SEARCH)):
        text = json.dumps(own)
        assert other.namespace not in text
        assert other.secret_key not in text
    cluster_wide = [entry["kind"] for entry in search if "namespace" not in entry["metadata"]]
    assert cluster_wide == ["Namespace", "PersistentVolume"]


def test_the_store_refuses_a_team_in_anothers_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with seaweedfs(tmp_path / "s3", [SEARCH.identity(), LAW.identity()]) as server:
        server.client().create_bucket(Bucket=manifests.BUCKET)
        search, law = (Access(tmp_path, team, "", server.endpoint).store_client() for team in (SEARCH, LAW))
        key = f"{LAW.prefix}/of-law"
        law.put_object(Bucket=manifests.BUCKET, Key=key, Body=b"of law alone")
        expectations.a_prefix_is_closed_to_others(search, manifests.BUCKET, SEARCH.prefix, LAW.prefix, key)
        assert law.get_object(Bucket=manifests.BUCKET, Key=key)["Body"].read() == b"of law alone"
        # the administrator, whom nothing is closed to, fails the same expectation
        with pytest.raises(AssertionError, match="get: allowed"):
            expectations.a_prefix_is_closed_to_others(server.client(), manifests.BUCKET, SEARCH.prefix, LAW.prefix, key)
        # and what a stage does needs no more than the prefix
        monkeypatch.setattr(os, "environ", {**os.environ, **SEARCH.keys(), "AWS_ENDPOINT_URL_S3": server.endpoint})
        from longstraw_core.artifacts import open_store

        store = open_store(SEARCH.store, create=True)
        assert store.put_blob(b"bytes", "text/plain").size == 5


def team_driver(tmp_path: Path, api: KubeflowApi) -> ClusterDriver:
    lock = tmp_path / "images.lock.json"
    lock.write_text(json.dumps(LOCK), encoding="utf-8")
    access = Access(tmp_path / "kubeconfig", SEARCH, api.endpoint, "http://127.0.0.1:9")
    return ClusterDriver(access, lock, tmp_path)


def test_the_three_ways_of_submitting_start_the_same_pipeline(tmp_path: Path) -> None:
    with kubeflow_api() as api:
        driver = team_driver(tmp_path, api)
        pipeline = driver.compile("one")
        started = [
            driver.start("one", transactions=1, images=LOCK).identity,
            upload_and_run(api.endpoint, pipeline, "one"),
            stock_command(api.endpoint, pipeline, "one", tmp_path),
        ]
        assert set(started) == set(api.runs)
        assert set(api.uploads.values()) == {pipeline.read_bytes()}
        assert api.runs[started[0]]["service_account"] == "longstraw-search"
        assert driver.start("two", transactions=2, images=LOCK).wait(60)
        api.script = [{"run": "FAILED", "train": "FAILED"}]
        failed = driver.start("three", transactions=1, images=LOCK)
        assert not failed.wait(60)
        assert "train" in failed.said[-1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_of_the_specification_ask_for_accelerators_and_fit(tmp_path: Path, nodes: int) -> None:
    with kubeflow_api() as api:
        driver = team_driver(tmp_path, api)
        path = driver.specification("spread", nodes=nodes)
        out = tmp_path / "compiled.yaml"
        done = driver.access.longstraw("compile", str(path), "--images", str(driver.lock), "--out", str(out))
        assert done.returncode == 0, done.stderr
    platform = next(iter(yaml.safe_load_all(out.read_text(encoding="utf-8"))))
    names = set(platform["deploymentSpec"]["executors"])
    assert ("exec-capture-prefix-on-nodes" in names) == (nodes == 2)
    assert manifests.specification(SEARCH, "spread")["cluster"]["trainer"]["accelerators"] <= manifests.ACCELERATORS


@pytest.mark.skipif(not HELM.exists(), reason="make test fetches Helm")
def test_the_chart_takes_the_values_of_both_teams(tmp_path: Path) -> None:
    for team in (SEARCH, LAW):
        transaction = expectations.small_specification(manifests.specification(team, "registered"))
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(manifests.chart_values(team, LOCK, transaction)), encoding="utf-8")
        done = helm("template", team.name, str(site.ROOT / "charts/longstraw"), "--values", str(path))
        assert done.returncode == 0, done.stderr
        accounts = [entry for entry in yaml.safe_load_all(done.stdout) if entry and entry["kind"] == "ServiceAccount"]
        assert [entry["metadata"]["name"] for entry in accounts] == [team.account]


def test_the_commands_that_make_the_cluster(tools: Path, tmp_path: Path) -> None:
    for name in ("kind", "docker", "kubectl"):
        fake(tools, name, "node-a\nnode-b\n" if name == "kind" else "")
    with site._kind(tmp_path, tmp_path / "kubeconfig", f"kindest/node@{DIGEST}", tmp_path / "data"):
        site._let_nodes_pull_from("127.0.0.1:5001")
        site._advertise_accelerators(tmp_path / "kubeconfig")
        site.apply(tmp_path / "kubeconfig", manifests.team_objects(SEARCH))
    made = calls(tools)
    named = ["--name", manifests.CLUSTER]
    assert made[0][:7] == ["kind", "create", "cluster", *named, "--config", str(tmp_path / "kind.yaml")]
    assert ["docker", "network", "connect", "kind", site.REGISTRY, ""] in made
    directory = "/etc/containerd/certs.d/127.0.0.1:5001"
    hosts = '[host."http://longstraw-e2e-registry:5000"]\n  capabilities = ["pull", "resolve"]\n'
    for node in ("node-a", "node-b"):
        assert ["docker", "exec", node, "mkdir", "-p", directory, ""] in made
        copy = ["docker", "exec", "--interactive", node, "cp", "/dev/stdin", f"{directory}/hosts.toml", hosts]
        assert copy in made
    patched = [call for call in made if call[0] == "kubectl" and "patch" in call]
    assert [call[call.index("node") + 1] for call in patched] == ["node-a", "node-b"]
    assert all("--subresource=status" in call for call in patched)
    (applied,) = [call for call in made if "apply" in call]
    assert list(yaml.safe_load_all(applied[-1])) == manifests.team_objects(SEARCH)
    assert made[-1][:5] == ["kind", "delete", "cluster", *named]


def test_the_cluster_is_deleted_when_its_creation_fails(tools: Path, tmp_path: Path) -> None:
    fake(tools, "kind", "no engine\n", status=1)
    with (
        pytest.raises(SetupError, match="no engine"),
        site._kind(tmp_path, tmp_path / "kubeconfig", f"kindest/node@{DIGEST}", tmp_path),
    ):
        raise AssertionError("not reached")
    assert [call[1] for call in calls(tools)] == ["create", "delete"]


def test_what_kills_a_stage_ends_every_process_but_the_first(tmp_path: Path) -> None:
    """Run in a process namespace of its own, as `kubectl exec` does in a container's."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a process namespace")
    script = (
        "import subprocess, sys, time\n"
        "stage = subprocess.Popen(['sleep', '60'])\n"
        f"subprocess.run([sys.executable, '-c', {KILL_ALL!r}])\n"
        "print(stage.wait(10))\n"
    )
    unshared = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    done = subprocess.run(unshared, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("process namespaces are not to be had here")
    assert done.stdout == "-9\n", done.stderr

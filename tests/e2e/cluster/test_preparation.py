"""What makes the cluster of the tests, without a cluster: configuration, manifests, digests, commands and refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import HELM, helm
from tests.charts.test_chart import KUBERNETES, validate
from tests.e2e import expectations
from tests.e2e.cluster import images, manifests, site, upstream
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


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH; what is put there by `fake` writes down how it was called."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.invalid", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", "-C", str(directory), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


UPSTREAM_FILES = {
    "kubeflow/pipelines": {
        "manifests/kustomize/env/platform-agnostic/kustomization.yaml": (
            "namespace: kubeflow\nresources:\n- api.yaml\n- ../../third-party/argo\n"
        ),
        "manifests/kustomize/env/platform-agnostic/api.yaml": yaml.safe_dump_all(
            [
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "metadata": {"name": name},
                    "spec": {
                        "selector": {"matchLabels": {"app": name}},
                        "template": {
                            "metadata": {"labels": {"app": name}},
                            "spec": {
                                "containers": [
                                    {
                                        "name": "main",
                                        "image": "ghcr.io/kubeflow/api:2",
                                        "env": [
                                            {"name": "V2_DRIVER_IMAGE", "value": "ghcr.io/kubeflow/driver:2"},
                                            {"name": "OBJECTSTORECONFIG_HOST", "value": "seaweedfs.kubeflow"},
                                        ],
                                    }
                                ]
                            },
                        },
                    },
                }
                for name in ("ml-pipeline", "cache-server")
            ]
            + [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kfp-launcher"}, "data": {"a": "b"}}]
        ),
        "manifests/kustomize/third-party/argo/kustomization.yaml": (
            "resources:\n- https://github.com/argoproj/argo-workflows/manifests/base?ref=v4.0.5&timeout=60s\n"
        ),
        "manifests/kustomize/cluster-scoped-resources/kustomization.yaml": "resources:\n- namespace.yaml\n",
        "manifests/kustomize/cluster-scoped-resources/namespace.yaml": (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: kubeflow}\n"
        ),
        "elsewhere/large.bin": "not needed",
    },
    "argoproj/argo-workflows": {
        "manifests/base/kustomization.yaml": "resources:\n- controller.yaml\n",
        "manifests/base/controller.yaml": yaml.safe_dump(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "workflow-controller"},
                "spec": {
                    "selector": {"matchLabels": {"app": "controller"}},
                    "template": {
                        "metadata": {"labels": {"app": "controller"}},
                        "spec": {
                            "containers": [
                                {
                                    "name": "controller",
                                    "image": "quay.io/argoproj/controller:v4",
                                    "args": ["--executor-image", "quay.io/argoproj/argoexec:v4"],
                                }
                            ]
                        },
                    },
                },
            }
        ),
    },
}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[upstream.Repository, ...]:
    """Two repositories with tags, in the place of those on GitHub."""
    found = []
    for name, files in UPSTREAM_FILES.items():
        directory = tmp_path / "published" / name
        directory.mkdir(parents=True)
        git(directory, "init", "--quiet")
        for path, content in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(content, encoding="utf-8")
        git(directory, "add", ".")
        git(directory, "commit", "--quiet", "-m", "first")
        git(directory, "tag", "v1")
        found.append(upstream.Repository(name, "v1", git(directory, "rev-parse", "HEAD"), ("manifests",)))
    monkeypatch.setenv(upstream.SOURCE, f"file://{tmp_path / 'published'}")
    return tuple(found)


def test_manifests_are_fetched_checked_and_rendered_without_another_download(
    published: tuple[upstream.Repository, ...], tmp_path: Path
) -> None:
    destination, digests = tmp_path / "upstream", tmp_path / "list.sha256"
    upstream.fetch(published, destination)
    upstream.write_digests(destination, digests)
    upstream.verify(destination, digests)
    assert not (destination / "kubeflow/pipelines/elsewhere").exists()
    assert subprocess.run(["sha256sum", "-c", "--quiet", str(digests)], cwd=destination, check=False).returncode == 0
    if missing_tools(["kubectl"]):
        pytest.skip("kubectl renders")
    rendered = upstream.render(destination, SEARCH.namespace)
    assert {entry["metadata"]["namespace"] for entry in rendered} == {SEARCH.namespace}
    assert images.images_of(rendered) == {
        "ghcr.io/kubeflow/api:2",
        "ghcr.io/kubeflow/driver:2",
        "quay.io/argoproj/controller:v4",
        "quay.io/argoproj/argoexec:v4",
    }
    assert [entry["kind"] for entry in upstream.render(destination, None)] == ["Namespace"]
    upstream.verify(destination, digests)  # rendering changes a copy

    team = manifests.kubeflow_for(SEARCH, rendered)
    assert "cache-server" not in {entry["metadata"]["name"] for entry in team}
    assert "seaweedfs.kubeflow" not in json.dumps(team)
    (launcher,) = [entry["data"] for entry in team if entry["kind"] == "ConfigMap"]
    assert launcher["defaultPipelineRoot"] == "s3://longstraw/teams/search/kfp"
    assert yaml.safe_load(launcher["providers"])["s3"]["default"]["credentials"]["secretRef"]["secretName"] == (
        "longstraw-store"
    )
    lock = {image: f"{image.rpartition(':')[0]}@{DIGEST}" for image in images.images_of(team)}
    pinned = images.with_digests(team, lock)
    assert images.images_of(pinned) == set(lock.values())
    with pytest.raises(SetupError, match=r"quay.io/argoproj/argoexec:v4 is not in images.lock.json"):
        images.with_digests(team, {image: lock[image] for image in lock if "argoexec" not in image})


def test_a_moved_tag_is_refused(published: tuple[upstream.Repository, ...], tmp_path: Path) -> None:
    directory = tmp_path / "published" / published[0].name
    git(directory, "commit", "--quiet", "--allow-empty", "-m", "second")
    git(directory, "tag", "--force", "v1")
    with pytest.raises(SetupError, match=f"tag v1 is commit [0-9a-f]{{40}}, not {published[0].commit}"):
        upstream.fetch(published, tmp_path / "upstream")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: (root / "a/x.yaml").write_text("other"), "a/x.yaml: was changed"),
        (lambda root: (root / "a/x.yaml").unlink(), "a/x.yaml: is missing"),
        (lambda root: (root / "a/y.yaml").write_text("new"), "a/y.yaml: is not in the list"),
        (lambda root: (root / "a/y.yaml").symlink_to("x.yaml"), "neither a file nor a directory"),
    ],
)
def test_every_change_of_a_fetched_file_is_named(change: Any, words: str, tmp_path: Path) -> None:
    root, digests = tmp_path / "upstream", tmp_path / "list.sha256"
    (root / "a").mkdir(parents=True)
    (root / "a/x.yaml").write_text("as published")
    upstream.write_digests(root, digests)
    change(root)
    with pytest.raises(SetupError, match=words):
        upstream.verify(root, digests)


def test_the_committed_list_covers_what_the_committed_versions_need() -> None:
    names = [line.partition("  ")[2] for line in upstream.DIGESTS.read_text(encoding="utf-8").splitlines()]
    assert names == sorted(names)
    wanted = upstream.repositories()
    below = {f"{repository.name}/{directory}/" for repository in wanted for directory in repository.directories}
    for directory in below:
        assert any(name.startswith(directory) for name in names), directory
    assert all(any(name.startswith(directory) for directory in below) for name in names)
    assert f"{upstream.KUBEFLOW}/env/platform-agnostic/kustomization.yaml" in names
    assert f"{upstream.KUBEFLOW}/cluster-scoped-resources/kustomization.yaml" in names


def test_registries_are_asked_once_for_every_image(tools: Path) -> None:
    fake(tools, "skopeo", DIGEST + "\n")
    lock = images.resolve(["mysql:8.4", "ghcr.io/kubeflow/api:2", "docker.io/library/mysql:8.4"])
    assert lock == {
        "docker.io/library/mysql:8.4": f"docker.io/library/mysql@{DIGEST}",
        "ghcr.io/kubeflow/api:2": f"ghcr.io/kubeflow/api@{DIGEST}",
    }
    assert [call[:-1] for call in calls(tools)] == [
        ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{image}"] for image in sorted(lock)
    ]
    fake(tools, "skopeo", "<html>")
    with pytest.raises(SetupError, match="the registry's answer is no digest"):
        images.resolve(["mysql:8.4"])


def test_without_a_list_of_digests_nothing_begins(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make e2e-kind-lock"):
        images.load_lock(tmp_path / "images.lock.json")
    (tmp_path / "images.lock.json").write_text('{"mysql:8.4": "mysql:8.4"}')
    with pytest.raises(SetupError, match="not pinned by digest"):
        images.load_lock(tmp_path / "images.lock.json")


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

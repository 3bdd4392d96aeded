"""Upstream manifests and images: fetched by version, checked by digest, and every image replaced by a digest."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import images, manifests, upstream
from tests.e2e.cluster.tools import SetupError, missing_tools
from tests.support.fake_tools import calls, fake

SEARCH = manifests.Team("search", "s" * 40)
DIGEST = "sha256:" + "d" * 64


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

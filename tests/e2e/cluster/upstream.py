"""Manifests of Kubeflow Pipelines and Argo: fetched by version, checked by digest, rendered without another download.

Of them this repository keeps versions, commits, and the SHA-256 of every file. `python -m tests.e2e.cluster.upstream
DIRECTORY` fetches and checks; with `--write` it writes the list anew after the versions were changed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster.tools import SetupError, run

HERE = Path(__file__).resolve().parent
REPOSITORIES, DIGESTS = HERE / "upstream.json", HERE / "upstream.sha256"
SOURCE = "LONGSTRAW_E2E_UPSTREAM"
"""Optional: where the repositories are instead of https://github.com, for instance a mirror."""
ARGO = "argoproj/argo-workflows"
KUBEFLOW = "kubeflow/pipelines/manifests/kustomize"
_REMOTE = re.compile(r"https://github\.com/argoproj/argo-workflows/(?P<path>[^?\s]+)\?\S+")


@dataclass(frozen=True)
class Repository:
    """A repository at one version: tag, the commit that the tag must have, and the directories that are needed."""

    name: str
    version: str
    commit: str
    directories: tuple[str, ...]


def repositories(path: Path = REPOSITORIES) -> tuple[Repository, ...]:
    """Return what is to be fetched."""
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Repository(name, entry["version"], entry["commit"], tuple(entry["directories"]))
        for name, entry in sorted(entries.items())
    )


def fetch(wanted: tuple[Repository, ...], destination: Path) -> None:
    """Fill `destination/<repository>/` with the directories of every repository at its commit.

    Raises:
        SetupError: a tag points at another commit than it did.
    """
    source = os.environ.get(SOURCE, "https://github.com")
    for repository in wanted:
        with tempfile.TemporaryDirectory() as scratch:
            clone = ("clone", "--quiet", "--no-checkout", "--depth=1", "--filter=blob:none")
            run("git", *clone, f"--branch={repository.version}", f"{source}/{repository.name}", scratch)
            commit = run("git", "-C", scratch, "rev-parse", "HEAD")
            if commit != repository.commit:
                raise SetupError(
                    f"{repository.name}: tag {repository.version} is commit {commit}, not {repository.commit}: "
                    f"it was moved; do not use it before you know why"
                )
            run("git", "-C", scratch, "checkout", "--quiet", "HEAD", "--", *repository.directories)
            target = destination / repository.name
            shutil.rmtree(target, ignore_errors=True)
            for directory in repository.directories:
                shutil.copytree(Path(scratch) / directory, target / directory, symlinks=True)


def digests_of(directory: Path) -> dict[str, str]:
    """Return relative path → SHA-256 of every file below `directory`.

    Raises:
        SetupError: there is something else than files and directories.
    """
    found = {}
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise SetupError(f"{path}: neither a file nor a directory")
        if path.is_file():
            found[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def write_digests(directory: Path, path: Path = DIGESTS) -> None:
    """Write the list in the format of `sha256sum`."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests_of(directory).items())]
    path.write_text("".join(lines), encoding="utf-8")


def verify(directory: Path, path: Path = DIGESTS) -> None:
    """Compare every file with the list.

    Raises:
        SetupError: a file was changed, is missing or is not in the list.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = digests_of(directory)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = (
                "is missing" if name not in found else "is not in the list" if name not in expected else "was changed"
            )
            raise SetupError(f"{directory / name}: {what} ({path.name})")


def render(directory: Path, namespace: str | None) -> list[dict[str, Any]]:
    """Return Kubeflow Pipelines' own objects for a namespace, or the cluster-wide ones (namespace None).

    kustomize gets a copy in which references to Argo's repository are paths of what was checked, so it fetches nothing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "upstream"
        shutil.copytree(directory, copy)
        for path in copy.rglob("kustomization.yaml"):
            argo = os.path.relpath(copy / ARGO, path.parent)
            text = path.read_text(encoding="utf-8")
            path.write_text(_REMOTE.sub(lambda match, to=argo: f"{to}/{match['path']}", text), encoding="utf-8")
        if namespace is None:
            root = copy / KUBEFLOW / "cluster-scoped-resources"
        else:
            root = Path(scratch) / "team"
            root.mkdir()
            overlay = {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": namespace,
                "resources": [f"../upstream/{KUBEFLOW}/env/platform-agnostic"],
            }
            (root / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
        return [entry for entry in yaml.safe_load_all(run("kubectl", "kustomize", str(root))) if entry]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", action="store_true", help="write the list of digests instead of checking it")
    options = parser.parse_args()
    try:
        fetch(repositories(), options.directory)
        write_digests(options.directory) if options.write else verify(options.directory)
    except SetupError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

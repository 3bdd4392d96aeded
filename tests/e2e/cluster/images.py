"""Images that are not ours: found in rendered manifests, resolved to digests once, replaced by them ever after.

`python -m tests.e2e.cluster.images UPSTREAM_DIRECTORY` asks the registries and writes `images.lock.json`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.e2e.cluster import manifests, upstream
from tests.e2e.cluster.tools import SetupError, run

LOCK = Path(__file__).resolve().parent / "images.lock.json"
NODE = "kindest/node:v1.34.0@sha256:7416a61b42b1662ca6ca89f02028ac133a309a2a30ba309614e8ec94d976dc5a"
"""The node image of kind 0.30.0, by the digest that its release states."""
REGISTRY = "docker.io/library/registry:3"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def images_of(objects: Iterable[dict[str, Any]]) -> set[str]:
    """Return every image that workloads run or are told to run: of containers, in variables, in Argo's option."""
    found: set[str] = set()

    def note(image: str) -> str:
        found.add(image)
        return image

    for entry in objects:
        _replace(entry, note)
    return found


def with_digests(objects: Iterable[dict[str, Any]], lock: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the objects with every image by digest.

    Raises:
        SetupError: the lock does not know an image.
    """

    def pinned(image: str) -> str:
        if "@" in image:
            return image
        if full_name(image) not in lock:
            raise SetupError(f"{image} is not in {LOCK.name}: `make e2e-kind-lock` resolves it")
        return lock[full_name(image)]

    return [_replace(entry, pinned) for entry in objects]


def full_name(image: str) -> str:
    """Return the image's name with its registry, as `docker.io/library/mysql:8.4` for `mysql:8.4`."""
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def resolve(images: Iterable[str]) -> dict[str, str]:
    """Ask the registries: return image by tag → image by digest.

    Raises:
        SetupError: a registry does not answer, or with something else than a digest.
    """
    lock = {}
    for image in sorted({full_name(image) for image in images}):
        digest = run("skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{image}").strip()
        if _DIGEST.fullmatch(digest) is None:
            raise SetupError(f"{image}: the registry's answer is no digest: {digest[:80]!r}")
        lock[image] = f"{image.rpartition(':')[0]}@{digest}"
    return lock


def load_lock(path: Path = LOCK) -> dict[str, str]:
    """Return the lock.

    Raises:
        SetupError: there is none yet, or it holds something else than digests.
    """
    if not path.exists():
        raise SetupError(f"{path} is missing: `make e2e-kind-lock` asks the registries once and writes it; commit it")
    lock: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    for image, pinned in lock.items():
        if _DIGEST.fullmatch(pinned.partition("@")[2]) is None:
            raise SetupError(f"{path}: {image}: {pinned} is not pinned by digest")
    return lock


def _replace(node: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of an object in which `change` was applied to every image."""
    if isinstance(node, list):
        return list(_elements(node, change))
    if not isinstance(node, dict):
        return node
    copy = {key: _replace(value, change) for key, value in node.items()}
    # a custom resource definition describes fields named image; they are no text
    if isinstance(copy.get("image"), str) and "name" in copy:
        copy["image"] = change(copy["image"])
    if str(copy.get("name", "")).endswith("_IMAGE") and isinstance(copy.get("value"), str):
        copy["value"] = change(copy["value"])
    return copy


def _elements(nodes: list[Any], change: Callable[[str], str]) -> Iterator[Any]:
    before: Any = None
    for node in nodes:
        yield change(node) if before == "--executor-image" else _replace(node, change)
        before = node


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where tests.e2e.cluster.upstream put the manifests")
    options = parser.parse_args()
    try:
        upstream.verify(options.directory)
        team = manifests.Team("any", "none")
        used = images_of(manifests.kubeflow_for(team, upstream.render(options.directory, team.namespace)))
        lock = resolve(used | {manifests.STORAGE_IMAGE, REGISTRY})
    except SetupError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    LOCK.write_text(json.dumps(lock, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Everything the pipeline in containers needs, made once: engine, registry, base, images, lock, S3."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.containers.engine import container_engine, install, push_base_image, registry
from tests.servers.seaweedfs import S3Server, seaweedfs

ROOT = Path(__file__).resolve().parents[3]
SWITCH = "LONGSTRAW_E2E_CONTAINERS"
SERVER = "LONGSTRAW_E2E_SERVER"
"""Optional: SGLang goes into the sampler image too; the transactions here do not need its gigabytes."""
KEEP = "LONGSTRAW_E2E_BASE"
"""Optional: a base image by digest, instead of one made by debootstrap."""


@dataclass(frozen=True)
class Site:
    """What the tests run against."""

    registry: str
    base: str
    lock: Path
    server: S3Server
    bucket: str

    def images(self) -> dict[str, str]:
        return json.loads(self.lock.read_text(encoding="utf-8"))

    def build_again(self, role: str) -> str:
        """Build one role in directories of its own, push it elsewhere and return its digest."""
        directory = self.lock.parent / "again"
        lock = directory / "images.lock.json"
        build_images(f"{self.registry}/again", self.base, lock, "--role", role, cache=False)
        return json.loads(lock.read_text(encoding="utf-8"))[role].partition("@")[2]


def build_images(repository: str, base: str, lock: Path, *options: str, cache: bool = True) -> None:
    """Run `images/build.py` on the working tree and print what it took.

    Without the cache pip makes wheels of source archives anew, as another machine would.
    """
    started = time.monotonic()
    lock.parent.mkdir(parents=True, exist_ok=True)
    build = [sys.executable, "images/build.py", "--registry", repository, "--insecure-registry", "--variant", "cpu"]
    build += ["--base", base, "--lock", str(lock), "--bills", str(lock.parent / "sbom"), "--allow-changes", *options]
    if not os.environ.get(SERVER):
        build.append("--without-server")
    environment = os.environ | ({} if cache else {"PIP_NO_CACHE_DIR": "1"})
    subprocess.run(build, cwd=ROOT, check=True, env=environment)
    figure = f"{len(json.loads(lock.read_text(encoding='utf-8')))} images built and pushed"
    print(json.dumps({"figure": figure, "seconds": round(time.monotonic() - started)}))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(SWITCH):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a container engine: make e2e-containers"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    # containers run as a user that is not root and must reach what is mounted
    for path in (directory, *directory.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):  # noqa: S108
            path.chmod(path.stat().st_mode | 0o055)
    install()
    with container_engine(directory) as address, registry(directory) as host, seaweedfs(directory / "s3") as server:
        os.environ["DOCKER_HOST"] = address
        base = os.environ.get(KEEP) or push_base_image(directory, host)
        lock = directory / "images.lock.json"
        build_images(f"{host}/longstraw", base, lock)
        bucket = "longstraw"
        server.client().create_bucket(Bucket=bucket)
        yield Site(host, base, lock, server, bucket)

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
KEEP = "LONGSTRAW_E2E_BASE"
"""Optional: a base image by digest, instead of one made by debootstrap."""


@dataclass(frozen=True)
class Site:
    """What the tests run against."""

    registry: str
    lock: Path
    server: S3Server
    bucket: str

    def images(self) -> dict[str, str]:
        return json.loads(self.lock.read_text(encoding="utf-8"))


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
        started = time.monotonic()
        build = [sys.executable, "images/build.py", "--registry", f"{host}/longstraw", "--insecure-registry"]
        build += ["--variant", "cpu", "--base", base, "--lock", str(lock), "--bills", str(directory / "sbom")]
        subprocess.run([*build, "--allow-changes"], cwd=ROOT, check=True)
        print(json.dumps({"figure": "three images built and pushed", "seconds": round(time.monotonic() - started)}))
        bucket = "longstraw"
        server.client().create_bucket(Bucket=bucket)
        yield Site(host, lock, server, bucket)

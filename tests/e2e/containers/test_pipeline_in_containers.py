"""The compiled pipeline in real containers: every stage in the image that the lock names, artifacts on a real S3."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
import yaml

from tests.conftest import make_row
from tests.e2e import expectations
from tests.e2e.containers.conftest import ROOT, SERVER, Site
from tests.e2e.expectations import COMMAND, small_specification


@dataclass
class ContainerRun:
    """A run of KFP's local Docker runner in a process of its own."""

    process: "subprocess.Popen[str]"
    log: Path

    def wait(self, seconds: float) -> bool:
        return self.process.wait(timeout=seconds) == 0

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill_stage(self, stage: str) -> None:
        client = docker.from_env()
        while self.process.poll() is None:
            for container in client.containers.list():
                if stage in container.attrs["Args"] and has_begun(container, stage):
                    container.kill()
                    return
            time.sleep(0.2)
        raise AssertionError(f"the run ended before {stage} began\n{self.text()[-4000:]}")


def has_begun(container: Any, stage: str) -> bool:
    """Whether the stage in a container has printed anything; one that is being removed cannot be asked."""
    try:
        return stage.encode() in container.logs()
    except docker.errors.APIError:
        return False


@dataclass(frozen=True)
class ContainerDriver:
    """Starts runs on the engine; every run has a directory of its own that its containers see."""

    site: Site
    snapshot: Path
    directory: Path

    def images(self) -> dict[str, str]:
        return self.site.images()

    def store(self) -> str:
        return f"s3://{self.site.bucket}/team"

    def store_client(self) -> Any:
        return self.site.server.client()

    def store_environment(self) -> dict[str, str]:
        return {**os.environ, **self.site.server.environment()}

    def start(self, name: str, *, transactions: int, images: Mapping[str, str]) -> ContainerRun:
        lock = self.directory / "images.lock.json"
        lock.write_text(json.dumps(dict(images)), encoding="utf-8")
        settings = self._settings(self._compile(name, lock, transactions))
        log = self.directory / "pipeline.log"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.containers.docker_pipeline", str(settings)],
            cwd=ROOT,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        return ContainerRun(process, log)

    def _compile(self, name: str, lock: Path, transactions: int) -> Path:
        rows, spec = self.directory / "rows.jsonl", self.directory / "transaction.yaml"
        rows.write_text("".join(json.dumps(make_row(number)) + "\n" for number in range(4)), encoding="utf-8")
        fields: dict[str, Any] = {
            "name": name,
            "model": {"snapshot": str(self.snapshot), "family": "qwen3_5_text", "dtype": "float32"},
            "data": {"path": str(rows)},
            "storage": {"uri": self.store()},
            "cluster": {"retries": {"count": 2, "backoff_seconds": 1}},
        }
        spec.write_text(yaml.safe_dump(small_specification(fields)), encoding="utf-8")
        out = self.directory / "pipeline.yaml"
        subprocess.run(
            [*COMMAND, "compile", str(spec), "--out", str(out), "--transactions", str(transactions)],
            check=True,
            cwd=ROOT,
            env={**os.environ, "LONGSTRAW_IMAGES_LOCK": str(lock)},
        )
        return out

    def _settings(self, pipeline: Path) -> Path:
        scratch = self.directory / "scratch"
        aws = scratch / ".aws"
        aws.mkdir(parents=True)
        scratch.chmod(0o777)
        server = self.site.server
        (aws / "credentials").write_text(
            f"[default]\naws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
        )
        (aws / "config").write_text(f"[default]\nregion={server.region}\nendpoint_url={server.endpoint}\n")
        root = self.directory / "kfp"
        root.mkdir(mode=0o777)
        root.chmod(0o777)
        rows = str(self.directory / "rows.jsonl")
        mounts = [
            {"source": str(scratch), "target": "/scratch", "read_only": False},
            {"source": str(self.snapshot), "target": str(self.snapshot), "read_only": True},
            {"source": rows, "target": rows, "read_only": True},
        ]
        path = self.directory / "settings.json"
        path.write_text(
            json.dumps({"pipeline": str(pipeline), "arguments": {}, "root": str(root), "mounts": mounts}),
            encoding="utf-8",
        )
        return path


def open_to_all(directory: Path) -> None:
    """Let a user that is not root read a directory and reach it."""
    for path in (directory, *directory.rglob("*"), *directory.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):  # noqa: S108
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))


@pytest.fixture
def driver(site: Site, untrained_snapshot: Path, tmp_path: Path) -> ContainerDriver:
    open_to_all(tmp_path)
    open_to_all(untrained_snapshot)
    return ContainerDriver(site, untrained_snapshot, tmp_path)


def test_two_transactions_verify_and_name_the_locked_images(driver: ContainerDriver) -> None:
    started = time.monotonic()
    run = driver.start("two-transactions", transactions=2, images=driver.images())
    expectations.completes_with_the_locked_images(driver, run, "two-transactions", 2)
    print(json.dumps({"figure": "two transactions in containers", "seconds": round(time.monotonic() - started)}))


def test_the_image_of_another_role_is_refused_by_name(driver: ContainerDriver) -> None:
    expectations.refuses_the_image_of_another_role(driver, "other-role")


def test_a_digest_that_the_registry_does_not_have_is_an_error_that_names_it(driver: ContainerDriver) -> None:
    expectations.names_a_digest_that_the_registry_does_not_have(driver, "absent-digest")


def test_a_container_killed_mid_stage_is_retried_and_the_run_completes(driver: ContainerDriver) -> None:
    expectations.survives_a_stage_that_is_killed(driver, "killed-stage")


def test_the_same_tree_gives_the_same_digest_again(site: Site) -> None:
    """A second build from the same tree, base and locks: nothing of it comes from the first."""
    again = site.build_again("control")
    assert again == site.images()["control"].partition("@")[2]


@pytest.mark.skipif(not os.environ.get(SERVER), reason=f"the image has no server unless {SERVER}=1")
def test_the_server_starts_in_the_sampler_image_as_any_user(site: Site) -> None:
    # without a GPU torchvision's build for CUDA needs what the shim declares
    said = docker.from_env().containers.run(
        site.images()["sampler"],
        ["sh", "-c", 'exec "$LONGSTRAW_SGLANG_PYTHON" -m sglang.launch_server --help'],
        user="12345:12345",
        read_only=True,
        cap_drop=["ALL"],
        tmpfs={"/tmp": "mode=1777"},  # noqa: S108
        volumes={str(ROOT / "tests/support/sglang/shim"): {"bind": "/shim", "mode": "ro"}},
        environment={"PYTHONPATH": "/shim", "SGLANG_USE_CPU_ENGINE": "1"},
        network_mode="none",
        remove=True,
    )
    assert b"--lora-paths" in said

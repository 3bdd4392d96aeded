"""The compiled pipeline in real containers: every stage in the image that the lock names, artifacts on a real S3."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from tests.conftest import make_row
from tests.e2e.containers.conftest import ROOT, Site

COMMAND = [sys.executable, "-m", "longstraw_core.cli"]


@dataclass
class Scene:
    """One specification, and the directories that its containers see."""

    site: Site
    directory: Path
    name: str

    def specification(self, snapshot: Path) -> Path:
        rows = self.directory / "rows.jsonl"
        rows.write_text("".join(json.dumps(make_row(number)) + "\n" for number in range(4)), encoding="utf-8")
        fields: dict[str, Any] = {
            "name": self.name,
            "model": {"snapshot": str(snapshot), "family": "qwen3_5_text", "dtype": "float32"},
            "lora": {"rank": 8, "alpha": 16.0},
            "data": {"path": str(rows), "prompts_per_transaction": 2},
            "sampling": {"group_size": 4, "max_response_tokens": 4},
            "objective": {"gradient": "exact", "mask_truncated": False},
            "layout": {"prompt_chunk_tokens": 16, "page_tokens": 16},
            "storage": {"uri": f"s3://{self.site.bucket}/team"},
            "cluster": {"retries": {"count": 2, "backoff_seconds": 1}},
        }
        path = self.directory / "transaction.yaml"
        path.write_text(yaml.safe_dump(fields), encoding="utf-8")
        return path

    def compile(self, snapshot: Path, lock: Path, transactions: int) -> Path:
        out = self.directory / "pipeline.yaml"
        command = [*COMMAND, "compile", str(self.specification(snapshot)), "--out", str(out)]
        subprocess.run(
            [*command, "--transactions", str(transactions)],
            check=True,
            cwd=ROOT,
            env={**os.environ, "LONGSTRAW_IMAGES_LOCK": str(lock)},
        )
        return out

    def settings(self, pipeline: Path, snapshot: Path) -> Path:
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
        mounts = [
            {"source": str(scratch), "target": "/scratch", "read_only": False},
            {"source": str(snapshot), "target": str(snapshot), "read_only": True},
            {
                "source": str(self.directory / "rows.jsonl"),
                "target": str(self.directory / "rows.jsonl"),
                "read_only": True,
            },
        ]
        path = self.directory / "settings.json"
        path.write_text(
            json.dumps({"pipeline": str(pipeline), "arguments": {}, "root": str(root), "mounts": mounts}),
            encoding="utf-8",
        )
        return path

    def start(self, snapshot: Path, lock: Path, transactions: int) -> "subprocess.Popen[str]":
        settings = self.settings(self.compile(snapshot, lock, transactions), snapshot)
        self.log = self.directory / "pipeline.log"
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.containers.docker_pipeline", str(settings)],
            cwd=ROOT,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def receipts(self) -> dict[str, dict[str, Any]]:
        client = self.site.server.client()
        prefix = f"team/runs/{self.name}/"
        found = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.site.bucket, Prefix=prefix):
            for entry in page.get("Contents", []):
                if entry["Key"].endswith("receipt.json"):
                    body = client.get_object(Bucket=self.site.bucket, Key=entry["Key"])["Body"].read()
                    found[entry["Key"].removeprefix(prefix).removesuffix("/receipt.json")] = json.loads(body)
        return found


@pytest.fixture(scope="session")
def snapshot(untrained_snapshot: Path) -> Path:
    open_to_all(untrained_snapshot)
    return untrained_snapshot


def open_to_all(directory: Path) -> None:
    """Let a user that is not root read a directory and reach it."""
    for path in (directory, *directory.rglob("*"), *directory.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):  # noqa: S108
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))


@pytest.fixture
def scene(site: Site, tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    open_to_all(tmp_path)
    return Scene(site, tmp_path, request.node.name.replace("_", "-").removeprefix("test-")[:40].strip("-"))


def test_two_transactions_verify_and_name_the_locked_images(scene: Scene, snapshot: Path) -> None:
    started = time.monotonic()
    process = scene.start(snapshot, scene.site.lock, transactions=2)
    assert process.wait(timeout=1800) == 0, scene.text()[-4000:]
    print(json.dumps({"figure": "two transactions in containers", "seconds": round(time.monotonic() - started)}))
    receipts = scene.receipts()
    assert len(receipts) == 18
    locked = {reference.partition("@")[2] for reference in scene.site.images().values()}
    observed = {receipt["predicate"]["image_digest"] for receipt in receipts.values()}
    assert observed == locked
    verified = subprocess.run(
        [*COMMAND, "verify", f"s3://{scene.site.bucket}/team", "--run", scene.name, "--deep", "-o", "json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **scene.site.server.environment()},
        check=False,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_image_of_another_role_is_refused_by_name(scene: Scene, snapshot: Path) -> None:
    images = scene.site.images()
    lock = scene.directory / "wrong.lock.json"
    lock.write_text(json.dumps({**images, "trainer": images["control"]}), encoding="utf-8")
    assert scene.start(snapshot, lock, transactions=1).wait(timeout=600) != 0
    assert "needs the image of role trainer" in scene.text()
    assert set(scene.receipts()) == {"0001/audit_data"}


def test_a_digest_that_the_registry_does_not_have_is_an_error_that_names_it(scene: Scene, snapshot: Path) -> None:
    images = scene.site.images()
    absent = images["control"].partition("@")[0] + "@sha256:" + "0" * 64
    lock = scene.directory / "absent.lock.json"
    lock.write_text(json.dumps({**images, "control": absent}), encoding="utf-8")
    assert scene.start(snapshot, lock, transactions=1).wait(timeout=600) != 0
    assert "sha256:" + "0" * 64 in scene.text()
    assert scene.receipts() == {}


def has_begun(container: Any) -> bool:
    """Whether the stage in a container has printed anything; one that is being removed cannot be asked."""
    try:
        return b"capture_prefix" in container.logs()
    except docker.errors.APIError:
        return False


def test_a_container_killed_mid_stage_is_retried_and_the_run_completes(scene: Scene, snapshot: Path) -> None:
    process = scene.start(snapshot, scene.site.lock, transactions=1)
    client = docker.from_env()
    killed = None
    while killed is None and process.poll() is None:
        for container in client.containers.list():
            if "capture_prefix" in container.attrs["Args"] and has_begun(container):
                container.kill()
                killed = container.id
        time.sleep(0.2)
    assert killed is not None, scene.text()[-4000:]
    assert process.wait(timeout=1200) == 0, scene.text()[-4000:]
    assert len(scene.receipts()) == 9

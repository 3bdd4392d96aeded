"""The stock `kfp` command on our compiled pipeline, against the fake: the README's second way, and its traps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from longstraw_core.cli.main import main
from tests.servers.kubeflow_api import KubeflowApi

KFP = Path(sys.executable).with_name("kfp")


@pytest.fixture
def pipeline(cluster_spec: Path, images: Path, tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    result = CliRunner().invoke(main, ["compile", str(cluster_spec), "--images", str(images), "--out", str(path)])
    assert result.exit_code == 0, result.output
    return path


def kfp(api: KubeflowApi, home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(KFP), "--endpoint", api.endpoint, *(str(argument) for argument in arguments)],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_uploads_runs_and_answers_0_for_a_failed_run(api: KubeflowApi, pipeline: Path, tmp_path: Path) -> None:
    assert kfp(api, tmp_path, "pipeline", "create", "-p", "longstraw", pipeline).returncode == 0
    (version,) = api.versions.values()
    assert api.uploads[version["pipeline_version_id"]] == pipeline.read_bytes()

    api.script = [{"run": "FAILED", "train": "FAILED"}]
    created = kfp(
        api, tmp_path, "run", "create", "-e", "ci", "-r", "first", "-f", pipeline, "-w", "trainer_memory=512Gi"
    )
    assert created.returncode == 0, created.stderr  # the trap: the run FAILED
    (run,) = api.runs.values()
    assert run["state"] == "FAILED"
    assert run["runtime_config"]["parameters"] == {"trainer_memory": "512Gi"}
    # what README tells to do about it
    (run_id,) = set(re.findall(r"/runs/details/(\S+)", created.stdout))
    status = CliRunner().invoke(main, ["status", run_id, "--endpoint", api.endpoint])
    assert status.exit_code == 3


def test_a_text_that_looks_like_a_number_needs_quotes(api: KubeflowApi, pipeline: Path, tmp_path: Path) -> None:
    create = ("run", "create", "-e", "ci", "-f", pipeline)
    refused = kfp(api, tmp_path, *create, "run=20260901")
    assert refused.returncode == 1
    assert api.runs == {}
    assert kfp(api, tmp_path, *create, 'run="20260901"').returncode == 0
    (run,) = api.runs.values()
    assert run["runtime_config"]["parameters"] == {"run": "20260901"}

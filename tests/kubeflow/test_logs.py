"""`longstraw logs` against an HTTP fake of the Kubernetes API."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from longstraw_core.cli.main import main
from tests.servers.kubeflow_api import KubeflowApi
from tests.servers.kubernetes_reads import KubernetesReads, kubernetes_reads

RUN = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def cluster() -> Iterator[KubernetesReads]:
    with kubernetes_reads() as server:
        server.pod("run-sample", "sample", RUN, ["s 1", "s 2"])
        server.pod("run-train", "train", RUN, ["t 1", "t 2", "t 3"])
        server.pod("other", "train", "another-run", ["no"])
        yield server


@pytest.fixture
def logs(cluster: KubernetesReads, tmp_path: Path) -> list[str]:
    return ["logs", RUN, "--kubeconfig", str(cluster.kubeconfig(tmp_path / "config"))]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_the_logs_of_all_stages_come_in_the_order_of_the_pods(logs: list[str]) -> None:
    result = invoke(*logs)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["[sample] s 1", "[sample] s 2", "[train] t 1", "[train] t 2", "[train] t 3"]


def test_one_stage_and_its_last_lines_can_be_asked_for(logs: list[str]) -> None:
    result = invoke(*logs, "--stage", "train", "--tail", "2", "-o", "json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"event": "log", "stage": "train", "pod": "run-train", "line": f"t {number}"} for number in (2, 3)
    ]


def test_a_pod_that_has_not_started_has_no_log_yet(logs: list[str], cluster: KubernetesReads) -> None:
    cluster.pod("run-waiting", "validate_run", RUN, [], phase="Pending")
    result = invoke(*logs, "--stage", "validate_run")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""


def test_a_run_without_pods_is_an_error_that_says_why(logs: list[str]) -> None:
    result = invoke(*logs, "--stage", "export_lora")
    assert result.exit_code == 2
    assert "namespace team has no pod of stage export_lora" in result.stderr
    elsewhere = invoke(*logs, "-n", "elsewhere")
    assert elsewhere.exit_code == 2


def test_following_takes_a_broken_log_up_again_without_repeating_a_line(
    logs: list[str], cluster: KubernetesReads, api: KubeflowApi
) -> None:
    api.script = [{"run": "RUNNING"}, {"run": "RUNNING"}, {"run": "SUCCEEDED"}]
    api.runs[RUN], api.looks[RUN] = {"run_id": RUN, "display_name": "x"}, 0
    cluster.broken_logs = 2
    result = invoke(*logs, "-f", "--endpoint", api.endpoint, "--poll-seconds", "0.05")
    assert result.exit_code == 0, result.output
    assert Counter(result.stdout.splitlines()) == Counter(
        ["[sample] s 1", "[sample] s 2", "[train] t 1", "[train] t 2", "[train] t 3"]
    )


def test_a_terminal_cannot_be_driven_by_a_log(logs: list[str], cluster: KubernetesReads) -> None:
    cluster.logs["run-train"] = ["\x1b[2Jgone"]
    assert "\x1b" not in invoke(*logs, "--stage", "train").stdout

"""`longstraw logs` against an HTTP fake of the Kubernetes API."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from longstraw_core.artifacts import FileStore
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


def following(logs: list[str], api: KubeflowApi, script: list[dict[str, str]]) -> Result:
    api.script = script
    api.runs[RUN], api.looks[RUN] = {"run_id": RUN, "display_name": "x"}, 0
    return invoke(*logs, "-f", "--endpoint", api.endpoint, "--poll-seconds", "0.05")


def test_following_survives_servers_that_are_away_for_a_moment(
    logs: list[str], cluster: KubernetesReads, api: KubeflowApi
) -> None:
    api.failures = [503, 0, 0, 0, 0]
    cluster.failures = [503, 429]
    result = following(logs, api, [{"run": "RUNNING"}] * 4 + [{"run": "SUCCEEDED"}])
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == sorted(
        ["[sample] s 1", "[sample] s 2", "[train] t 1", "[train] t 2", "[train] t 3"]
    )
    assert (api.failures, cluster.failures) == ([], [])


def test_following_ends_when_a_pod_is_deleted_under_it(
    logs: list[str], cluster: KubernetesReads, api: KubeflowApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.pods[1]["status"]["phase"] = "Running"
    cluster.pods[1]["status"]["containerStatuses"][0]["state"] = {"running": {}}
    answer = KubernetesReads.answer

    def deleted_once_shown(self: KubernetesReads, method: str, url: str, body: bytes) -> tuple[int, object]:
        answered = answer(self, method, url, body)
        if "/run-train/log" in url:
            self.pods = [pod for pod in self.pods if pod["metadata"]["name"] != "run-train"]
            self.logs.pop("run-train", None)
        return answered

    monkeypatch.setattr(KubernetesReads, "answer", deleted_once_shown)
    result = following(logs, api, [{"run": "RUNNING"}] * 5 + [{"run": "SUCCEEDED"}])
    assert result.exit_code == 0, result.output
    assert "[train] t 3" in result.stdout


def test_a_pod_that_is_deleted_between_two_questions_is_passed_over(logs: list[str], cluster: KubernetesReads) -> None:
    del cluster.logs["run-sample"]
    result = invoke(*logs)
    assert result.exit_code == 0, result.output
    assert "run-sample was deleted" in result.stderr
    assert result.stdout.splitlines() == ["[train] t 1", "[train] t 2", "[train] t 3"]


def test_following_without_the_right_to_read_logs_ends(
    logs: list[str], cluster: KubernetesReads, api: KubeflowApi
) -> None:
    cluster.denied.add(("", "pods/log", "get"))
    result = following(logs, api, [{"run": "RUNNING"}])
    assert result.exit_code == 2
    assert "403" in result.stderr


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe", b"a: 1", b"- 1", b""])
@pytest.mark.parametrize("command", [["logs", RUN], ["cleanup", "demo", "--store"]])
def test_a_file_that_is_no_kubeconfig_is_one_line(command: list[str], content: bytes, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_bytes(content)
    store = [FileStore(tmp_path / "store", create=True).uri] if command[0] == "cleanup" else []
    result = invoke(*command, *store, "--kubeconfig", str(config))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "--kubeconfig" in result.stderr


def test_a_token_that_no_header_carries_is_not_quoted(
    logs: list[str], cluster: KubernetesReads, tmp_path: Path
) -> None:
    config = cluster.kubeconfig(tmp_path / "config")
    config.write_text(config.read_text().replace("token: t", 'token: "word-1\\ninjected: x"'))
    result = invoke(*logs)
    assert result.exit_code == 2
    assert "the token cannot be sent" in result.stderr
    assert "word-1" not in result.output

"""`longstraw submit`, `status` and `cancel` against an HTTP fake of KFP's API server."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner, Result

from longstraw_core.cli.main import main
from longstraw_core.kubeflow.watch import watch_run
from longstraw_core.spec import Retryable, sha256_digest
from tests.servers.kubeflow_api import KubeflowApi, kubeflow_api
from tests.servers.kubernetes_api.kubelet import eventually
from tests.servers.kubernetes_api.proxy import Proxy
from tests.servers.kubernetes_reads import kubernetes_reads

STAGES = ("audit-data", "export-lora", "sample", "train")


def invoke(*arguments: object, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=environment)


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def submit(cluster_spec: Path, images: Path, api: KubeflowApi) -> list[object]:
    return ["submit", cluster_spec, "--images", images, "--endpoint", api.endpoint, "--poll-seconds", "0.05"]


def test_a_run_is_created_from_a_version_whose_name_is_its_content(submit: list[object], api: KubeflowApi) -> None:
    result = invoke(
        *submit,
        *("--pipeline-root", "s3://bucket/kfp", "--service-account", "trainer", "--experiment", "nightly"),
        *("--run-name", "third try", "--param", "trainer_memory=512Gi", "--param", 'node_selector={"pool": "h200"}'),
        *("-o", "json"),
    )
    assert result.exit_code == 0, result.output
    (run,) = api.runs.values()
    (version,) = api.versions.values()
    content = api.uploads[version["pipeline_version_id"]]
    assert version["display_name"] == sha256_digest(content).replace(":", "-")
    assert run["pipeline_version_reference"] == {
        "pipeline_id": version["pipeline_id"],
        "pipeline_version_id": version["pipeline_version_id"],
    }
    assert run["runtime_config"] == {
        "parameters": {"trainer_memory": "512Gi", "node_selector": {"pool": "h200"}},
        "pipeline_root": "s3://bucket/kfp",
    }
    assert (run["service_account"], run["display_name"]) == ("trainer", "third try")
    assert api.experiments[run["experiment_id"]]["display_name"] == "nightly"
    (submitted,) = events(result)
    assert submitted["run_id"] == run["run_id"]
    assert submitted["url"] == f"{api.endpoint}/#/runs/details/{run['run_id']}"


def test_the_same_content_is_uploaded_once_and_other_content_is_another_version(
    submit: list[object], api: KubeflowApi
) -> None:
    for extra in ((), (), ("--set", "seed=7")):
        assert invoke(*submit, *extra).exit_code == 0
    assert len(api.pipelines) == 1
    assert len(api.experiments) == 1
    assert len(api.versions) == 2
    assert len(api.runs) == 3


def test_somebody_who_creates_the_same_thing_first_is_no_error(
    submit: list[object], api: KubeflowApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    listed = KubeflowApi._listed

    def overtaken(self: KubeflowApi, name: str, entries: dict[str, Any], query: dict[str, str]) -> dict[str, Any]:
        answer = listed(self, name, entries, query)
        if name == "pipelines" and not looked:
            looked.append(name)
            self._create_pipeline({"display_name": "longstraw"})
        return answer

    monkeypatch.setattr(KubeflowApi, "_listed", overtaken)
    result = invoke(*submit)
    assert result.exit_code == 0, result.output
    assert len(api.pipelines) == 1


def test_waiting_shows_every_change_and_ends_with_success(submit: list[object], api: KubeflowApi) -> None:
    api.script = [
        {"run": "RUNNING", "audit-data": "RUNNING"},
        {"audit-data": "SUCCEEDED", "train": "PENDING"},
        {"train": "RUNNING"},
        {"train": "SUCCEEDED", "run": "SUCCEEDED"},
    ]
    result = invoke(*submit, "--wait", "-o", "json")
    assert result.exit_code == 0, result.output
    seen = [(event.get("task"), event["state"]) for event in events(result) if event["event"] in ("task", "run")]
    assert seen == [
        ("audit-data", "RUNNING"),
        (None, "RUNNING"),
        ("audit-data", "SUCCEEDED"),
        ("train", "PENDING"),
        ("train", "RUNNING"),
        ("train", "SUCCEEDED"),
        (None, "SUCCEEDED"),
    ]


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", "SKIPPED"])
def test_only_succeeded_is_success(submit: list[object], api: KubeflowApi, state: str) -> None:
    api.script = [{"run": "RUNNING", "transaction 2/train": "RUNNING"}, {"run": state, "transaction 2/train": state}]
    result = invoke(*submit, "--wait")
    assert result.exit_code == 3
    assert f"is {state}" in result.stderr
    if state == "FAILED":
        assert "transaction 2/train: train exited with code 3" in result.stderr


def test_waiting_survives_a_server_that_is_away_for_a_moment(submit: list[object], api: KubeflowApi) -> None:
    run = events(invoke(*submit, "-o", "json"))[0]["run_id"]
    api.failures = [503, 0, 0, 0, 0, 429]
    result = invoke("status", run, "-f", "--endpoint", api.endpoint, "--poll-seconds", "0.05")
    assert result.exit_code == 0, result.output
    assert api.failures == []
    assert result.stderr.count("asking again") == 1


def test_the_wait_can_end_before_the_run(submit: list[object], api: KubeflowApi) -> None:
    api.script = [{"run": "RUNNING"}]
    result = invoke(*submit, "--wait", "--timeout-minutes", "0.002")
    assert result.exit_code == 75
    assert "it goes on" in result.stderr


def test_status_shows_stages_without_kfps_own_tasks(submit: list[object], api: KubeflowApi) -> None:
    api.script = [{"run": "RUNNING", "transaction 1/sample": "SUCCEEDED", "transaction 2/sample": "RUNNING"}]
    run = events(invoke(*submit, "-o", "json"))[0]["run_id"]
    shown = invoke("status", run, "--endpoint", api.endpoint, "-o", "json")
    assert shown.exit_code == 0, shown.output
    assert {(event.get("task"), event["state"]) for event in events(shown)} == {
        ("transaction 1", "RUNNING"),
        ("transaction 2", "RUNNING"),
        ("transaction 1/sample", "SUCCEEDED"),
        ("transaction 2/sample", "RUNNING"),
        (None, "RUNNING"),
    }
    table = invoke("status", run, "--endpoint", api.endpoint)
    assert "transaction 2/sample" in table.stdout
    assert "driver" not in table.stdout
    assert "42.0s" in table.stdout


def test_status_of_a_failed_run_fails(submit: list[object], api: KubeflowApi) -> None:
    api.script = [{"run": "FAILED", "train": "FAILED"}]
    run = events(invoke(*submit, "-o", "json"))[0]["run_id"]
    shown = invoke("status", run, "--endpoint", api.endpoint)
    assert shown.exit_code == 3
    assert "train exited with code 3" in shown.stderr


def test_cancel_ends_a_run_and_leaves_a_finished_one_alone(submit: list[object], api: KubeflowApi) -> None:
    api.script = [{"run": "RUNNING"}]
    run = events(invoke(*submit, "-o", "json"))[0]["run_id"]
    cancelled = invoke("cancel", run, "--endpoint", api.endpoint, "-f", "--poll-seconds", "0.05", "-o", "json")
    assert cancelled.exit_code == 0, cancelled.output
    assert events(cancelled)[-1]["state"] == "CANCELED"
    assert api.terminated == {run}
    again = invoke("cancel", run, "--endpoint", api.endpoint)
    assert again.exit_code == 0
    assert sum(path.endswith(":terminate") for _, path in api.requests) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model.snapshot": "model"}, "model.snapshot: model is relative"),
        ({"data.path": "/elsewhere/rows.jsonl"}, "data.path: /elsewhere/rows.jsonl is on no volume"),
        ({"data.path": "/data/../rows.jsonl"}, "on no volume"),
        ({"storage.uri": "file:///tmp/store"}, "storage.uri"),
        ({"storage.uri": "file://./store"}, "storage.uri"),
    ],
)
def test_what_no_pod_would_find_is_refused_before_anything_is_sent(
    submit: list[object], api: KubeflowApi, fields: dict[str, str], words: str
) -> None:
    overrides = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    result = invoke(*submit, *overrides)
    assert result.exit_code == 2
    assert words in result.stderr
    assert api.requests == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--param", "trainer_memry=1"], "trainer_memory"),
        (["--param", "node_selector=[]"], "is not a STRUCT"),
        (["--param", "tolerations=x"], "is not JSON"),
        (["--param", "run=a", "--param", "run=b"], "twice"),
        (["--param", "run=" + "x" * 10_000], "KFP takes 10000"),
        (["--param", "run=../../x"], "--param run: run name '../../x'"),
        (["--param", "run="], "--param run: run name ''"),
        (["--param", "spec=garbage"], "--param spec: "),
        (["--param", "parent_checkpoint=x"], "--param parent_checkpoint: "),
        (["--param", "trainer_memory=lots"], "--param trainer_memory: 'lots'"),
        (["--param", "sampler_cpu=0"], "--param sampler_cpu: '0'"),
        (["--param", "trainer_accelerators=-1"], "--param trainer_accelerators: '-1'"),
        (["--param", 'node_selector={"a": NaN}'], "NaN"),
        (["--set", "cluster.stages.train.nodes=2"], "cluster.stages.train.nodes: 2: layout.context_parallel is 1"),
        (
            [
                *("--set", "sampling.engine=sglang", "--set", "sampling.server.nodes=2"),
                *("--set", "sampling.server.tensor_parallel=2"),
            ],
            "cluster.stages.sample.nodes: 1: sampling.server.nodes is 2",
        ),
        (["--set", "data.path=/data/{{workflow.name}}"], "'{{'"),
        (["--timeout-minutes", "nan"], "finite"),
        (["--poll-seconds", "inf"], "finite"),
        (["--pipeline-root", "/x"], "--pipeline-root"),
        (["--endpoint", "localhost:8080"], "--endpoint"),
        (["--endpoint", "http://user:word@host"], "--endpoint"),
        (["--token-file", "/nowhere"], "--token-file"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_sent(
    submit: list[object], api: KubeflowApi, arguments: list[str], words: str
) -> None:
    result = invoke(*submit, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert api.requests == []


@pytest.mark.parametrize("endpoint", ["http://localhost:99999", "http://[::1"])
def test_an_endpoint_that_is_no_address_is_not_worth_another_try(endpoint: str) -> None:
    result = invoke("status", "a-run", "--endpoint", endpoint)
    assert result.exit_code == 2
    assert "--endpoint" in result.stderr


@pytest.mark.parametrize("command", ["status", "cancel", "logs"])
@pytest.mark.parametrize("run", ["", " ", "a,b", "../runs", "a\x1b[31m"])
def test_what_can_be_no_id_is_refused_before_anything_is_asked(
    api: KubeflowApi, tmp_path: Path, command: str, run: str
) -> None:
    with kubernetes_reads() as cluster:
        where = ["--kubeconfig", cluster.kubeconfig(tmp_path / "config")] if command == "logs" else []
        result = invoke(command, run, "--endpoint", api.endpoint, *where)
    assert result.exit_code == 2
    assert "is no run's id" in result.stderr
    assert "\x1b" not in result.stderr
    assert api.requests == []


def test_an_interrupted_wait_says_that_the_run_goes_on(submit: list[object], api: KubeflowApi) -> None:
    api.script = [{"run": "RUNNING"}]
    process = subprocess.Popen(
        [sys.executable, "-m", "longstraw_core.cli", *(str(argument) for argument in submit), "--wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: any(looks > 1 for looks in api.looks.values()), "the run is watched")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    (run,) = api.runs
    assert f"longstraw status {run} -f" in said
    assert "same command" not in said  # that would start a second run
    assert api.terminated == set()


def test_accelerators_of_a_spread_stage_are_those_that_the_run_will_have(
    submit: list[object], api: KubeflowApi
) -> None:
    spread = [*submit, "--set", "layout.context_parallel=16"]
    for stage in ("capture_prefix", "old_logprobs", "train"):
        spread += ["--set", f"cluster.stages.{stage}.nodes=2"]
    for accelerators in ((), ("--param", "trainer_accelerators=4")):
        refused = invoke(*spread, *accelerators)
        assert refused.exit_code == 2
        assert "layout.context_parallel 16 is 8 ranks per pod" in refused.stderr
    assert api.requests == []
    for accelerators in ("8", "0"):
        assert invoke(*spread, "--param", f"trainer_accelerators={accelerators}").exit_code == 0


def test_one_pod_with_fewer_accelerators_than_ranks_is_refused(submit: list[object], api: KubeflowApi) -> None:
    ranks = [*submit, "--set", "layout.context_parallel=8"]
    refused = invoke(*ranks, "--param", "trainer_accelerators=1")
    assert refused.exit_code == 2
    assert "8 ranks of stage capture_prefix run in one pod, which has 1 accelerator" in refused.stderr
    assert api.requests == []
    for accelerators in ("8", "0"):
        assert invoke(*ranks, "--param", f"trainer_accelerators={accelerators}").exit_code == 0


def test_a_text_parameter_stays_a_text_whatever_it_looks_like(submit: list[object], api: KubeflowApi) -> None:
    assert invoke(*submit, "--param", "run=7e1234").exit_code == 0
    (run,) = api.runs.values()
    assert run["runtime_config"]["parameters"] == {"run": "7e1234"}


def test_without_a_lock_nothing_is_submitted(
    cluster_spec: Path, api: KubeflowApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.images.DEFAULT_IMAGE_LOCK", tmp_path / "none.json")
    result = invoke("submit", cluster_spec, "--endpoint", api.endpoint)
    assert result.exit_code == 2
    assert "--images" in result.stderr
    assert api.requests == []


def test_a_token_is_needed_read_again_and_never_printed(submit: list[object], api: KubeflowApi, tmp_path: Path) -> None:
    api.token = "word-1"  # noqa: S105
    refused = invoke(*submit)
    assert refused.exit_code == 2
    assert "KFP_EXISTING_TOKEN" in refused.stderr
    assert invoke(*submit, environment={"KFP_EXISTING_TOKEN": "word-1"}).exit_code == 0
    file = tmp_path / "token"
    file.write_text("word-1\n")
    taken = invoke(*submit, "--token-file", file)
    assert taken.exit_code == 0
    assert "word-1" not in refused.output + taken.output


@pytest.mark.parametrize("token", ["word-1\ninjected: x", "word-1 x", "word-1€"])
def test_a_token_that_no_header_carries_is_refused_without_being_quoted(api: KubeflowApi, token: str) -> None:
    refused = invoke("status", "a-run", "--endpoint", api.endpoint, environment={"KFP_EXISTING_TOKEN": token})
    assert refused.exit_code == 2
    assert "KFP_EXISTING_TOKEN: does not hold one token" in refused.stderr
    assert "word-1" not in refused.output
    assert api.requests == []


def test_the_end_of_the_line_of_a_token_is_no_part_of_it(submit: list[object], api: KubeflowApi) -> None:
    api.token = "word-1"  # noqa: S105
    assert invoke(*submit, environment={"KFP_EXISTING_TOKEN": "word-1\n"}).exit_code == 0


def test_a_multi_user_installation_needs_a_profile(cluster_spec: Path, images: Path) -> None:
    with kubeflow_api(multi_user=True) as api:
        arguments = ["submit", cluster_spec, "--images", images, "--endpoint", api.endpoint]
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "--namespace" in refused.stderr
        assert invoke(*arguments, "-n", "team").exit_code == 0
        assert [entry["namespace"] for entry in (*api.experiments.values(), *api.pipelines.values())] == ["team"] * 2


def test_an_endpoint_that_nobody_serves_is_worth_another_try(cluster_spec: Path, images: Path) -> None:
    result = invoke("submit", cluster_spec, "--images", images, "--endpoint", "http://127.0.0.1:9")
    assert result.exit_code == 75
    assert len(result.stderr.splitlines()) == 1


def test_a_version_that_was_uploaded_is_what_compile_writes(
    submit: list[object], api: KubeflowApi, cluster_spec: Path, images: Path, tmp_path: Path
) -> None:
    assert invoke(*submit).exit_code == 0
    out = tmp_path / "pipeline.yaml"
    assert invoke("compile", cluster_spec, "--images", images, "--out", out).exit_code == 0
    assert list(api.uploads.values()) == [out.read_bytes()]
    assert yaml.safe_load_all(out.read_bytes())


def test_registering_uploads_once_and_starts_nothing(submit: list[object], api: KubeflowApi) -> None:
    first, second = (events(invoke(*submit, "--register-only", "-o", "json"))[0] for _ in range(2))
    assert (first["event"], first["uploaded"], second["uploaded"]) == ("registered", True, False)
    assert first["version_id"] == second["version_id"]
    assert not api.runs
    assert invoke(*submit, "--register-only", "--wait").exit_code == 2
    assert len(api.versions) == 1


@pytest.mark.parametrize("ending", ["", "/", "//", "/#/pipelines"])
def test_an_endpoint_may_have_a_path_and_an_end_as_the_browser_shows_it(
    cluster_spec: Path, images: Path, ending: str
) -> None:
    with kubeflow_api(prefix="/team/pipeline") as api:
        address = api.endpoint + ending
        result = invoke("submit", cluster_spec, "--images", images, "--endpoint", address, "-o", "json")
        assert result.exit_code == 0, result.output
        (submitted,) = events(result)
        assert submitted["url"] == f"{api.endpoint}/#/runs/details/{submitted['run_id']}"
        shown = invoke("status", submitted["run_id"], "--endpoint", address, "-n", "team", "-o", "json")
        assert shown.exit_code == 0, shown.output
        assert events(shown)[-1]["state"] == "RUNNING"


def test_waiting_survives_a_server_that_starts_again(submit: list[object], api: KubeflowApi) -> None:
    parts = urlsplit(api.endpoint)
    target = (str(parts.hostname), int(parts.port or 0))
    api.script = [{"run": "RUNNING"}] * 1000
    run = events(invoke(*submit, "-o", "json"))[0]["run_id"]
    proxies = [Proxy(target)]

    def restart() -> None:
        eventually(lambda: api.looks[run] > 1, "the run is watched")
        proxies[0].close()  # from now on connections are refused
        threading.Event().wait(1.0)
        seen = api.looks[run]
        proxies.append(Proxy(target, proxies[0].port))
        eventually(lambda: api.looks[run] > seen, "it is watched again")
        api.script = [{"run": "SUCCEEDED"}]

    thread = threading.Thread(target=restart)
    thread.start()
    address = f"http://127.0.0.1:{proxies[0].port}"
    result = invoke("status", run, "-f", "--endpoint", address, "--poll-seconds", "0.05")
    thread.join()
    for proxy in proxies:
        proxy.close()
    assert result.exit_code == 0, result.output


def test_a_server_that_stays_away_is_given_up_in_the_end() -> None:
    now = [0.0]

    def read() -> Any:
        raise Retryable("connection refused")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(Retryable, match=r"no answer for 60\d s; the run may still be going on"):
        watch_run(read, lambda *_: None, clock=lambda: now[0], sleep=sleep, poll_seconds=5.0, timeout_seconds=None)
    assert 600.0 < now[0] <= 610.0


def test_a_run_whose_creation_was_not_answered_is_not_started_twice(submit: list[object], api: KubeflowApi) -> None:
    api.lost_answers = 1
    result = invoke(*submit)
    assert result.exit_code == 75
    assert "it may have started" in result.stderr
    assert len(api.runs) == 1


def test_a_token_that_expires_while_waiting_is_read_again(
    submit: list[object], api: KubeflowApi, tmp_path: Path
) -> None:
    api.token = "word-1"  # noqa: S105
    file = tmp_path / "token"
    file.write_text("word-1\n")
    api.script = [{"run": "RUNNING"}] * 1000

    def replace() -> None:
        eventually(lambda: len(api.runs) == 1 and next(iter(api.looks.values())) > 1, "the run is watched")
        file.write_text("word-2\n")
        api.token = "word-2"  # noqa: S105
        seen = next(iter(api.looks.values()))
        eventually(lambda: next(iter(api.looks.values())) > seen, "it is watched with the new token")
        api.script = [{"run": "SUCCEEDED"}]

    thread = threading.Thread(target=replace)
    thread.start()
    result = invoke(*submit, "--wait", "--token-file", file)
    thread.join()
    assert result.exit_code == 0, result.output

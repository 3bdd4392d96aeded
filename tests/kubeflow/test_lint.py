"""The linter of compiled pipelines: what it finds in pipelines that the real compiler wrote."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kfp import compiler, dsl

from components.images import image_lock
from longstraw_core.cli.main import main
from longstraw_core.kubeflow.lint import lint_pipeline, load_pipeline
from longstraw_core.spec import SpecError

FOLDER = Path(__file__).parents[2] / "pipelines"
IMAGES = FOLDER / "example.images.lock.json"
DEFAULT = load_pipeline((FOLDER / "longstraw.yaml").read_bytes(), "longstraw.yaml")
LOCK = set(image_lock(IMAGES).values())
PINNED = "registry.example/x@sha256:" + "0" * 64


def container(pipeline: dict[str, Any], task: str = "train") -> dict[str, Any]:
    return pipeline["deploymentSpec"]["executors"][f"exec-{task}"]["container"]


def rules(pipeline: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding.task, finding.rule) for finding in lint_pipeline(pipeline, LOCK)]


@pytest.fixture
def pipeline() -> dict[str, Any]:
    return copy.deepcopy(DEFAULT)


def test_the_committed_pipeline_is_clean(pipeline: dict[str, Any]) -> None:
    assert rules(pipeline) == []


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("repo/x:v1", "names a tag"),
        ("repo/x@sha256:" + "0" * 63, "63 hex digits"),
        (PINNED, "not in the image lock"),
        ("{{$.inputs.parameters['pipelinechannel--img']}}", "decided at run time"),
    ],
)
def test_an_image_that_is_not_the_locks_is_found(pipeline: dict[str, Any], image: str, words: str) -> None:
    container(pipeline)["image"] = image
    (finding,) = lint_pipeline(pipeline, LOCK)
    assert (finding.task, finding.rule) == ("train", "image")
    assert words in finding.message


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m pip install --quiet torch",
        "pip3 install x",
        "pip3.12 install x",
        "python -m pip --index-url https://pypi.example install x",
        "pip \\\n  install x",
        "apt-get -y install git",
        "apt-get -o Acquire::Retries=3 install git",
        "uv sync",
        "uv pip install x",
        "run(['pip', 'install', p])",
        "run([sys.executable, '-m', 'pip', '-q', 'install', p])",
    ],
)
def test_an_installation_at_run_time_is_found(pipeline: dict[str, Any], text: str) -> None:
    container(pipeline)["command"].append(text)
    assert rules(pipeline) == [("train", "install")]


@pytest.mark.parametrize("command", [["pip", "install", "x"], ["python3", "-m", "pip", "--quiet", "install", "x"]])
def test_an_installation_whose_words_are_arguments_of_their_own_is_found(
    pipeline: dict[str, Any], command: list[str]
) -> None:
    container(pipeline)["command"] = command
    assert rules(pipeline) == [("train", "install")]


@pytest.mark.parametrize("text", ["the pip installation", "adapt add-ons", "--install pip", "uvicorn add"])
def test_words_that_install_nothing_are_no_finding(pipeline: dict[str, Any], text: str) -> None:
    container(pipeline)["command"].append(text)
    assert rules(pipeline) == []


def test_an_argument_that_linux_refuses_is_found_and_one_below_is_not(pipeline: dict[str, Any]) -> None:
    container(pipeline)["args"].append("é" * 50_000)
    assert rules(pipeline) == []
    container(pipeline)["args"][-1] += "x"
    assert rules(pipeline) == [("train", "size")]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("HF_TOKEN", "x", True),
        ("DB_PASSWORD", "x", True),
        ("AWS_ACCESS_KEY_ID", "x", True),
        ("PROXY", "http://user:word@proxy:80", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("AWS_SHARED_CREDENTIALS_FILE", "/secrets/aws", False),
        ("HF_TOKEN", "", False),
        ("PROXY", "http://proxy:80", False),
        ("CACHE", "redis://:word@cache/0", True),
        ("VALUE", "github_pat_" + "a" * 40, True),
        ("STORE_SECRET_NAME", "longstraw-store", False),
    ],
)
def test_a_literal_secret_is_found(pipeline: dict[str, Any], name: str, value: str, found: bool) -> None:
    container(pipeline)["env"].append({"name": name, "value": value})
    assert rules(pipeline) == ([("train", "secret")] if found else [])


def test_a_secret_in_an_argument_or_a_default_is_found(pipeline: dict[str, Any]) -> None:
    container(pipeline)["args"].append("--key=AKIA" + "Z" * 16)
    pipeline["root"]["inputDefinitions"]["parameters"]["run"]["defaultValue"] = "AKIA" + "Z" * 16
    assert rules(pipeline) == [("parameter run", "secret"), ("train", "secret")]


@pytest.mark.parametrize(
    ("value", "rule"), [("AKIA" + "Z" * 16, "secret"), ("x" * 100_001, "size"), ({"a": ["x" * 100_001]}, "size")]
)
def test_a_value_that_a_task_is_given_is_checked_like_an_argument(
    pipeline: dict[str, Any], value: object, rule: str
) -> None:
    inner = pipeline["components"]["comp-transaction"]
    inner["dag"]["tasks"]["train"]["inputs"]["parameters"]["spec"] = {"runtimeValue": {"constant": value}}
    assert rules(pipeline) == [("train, parameter spec", rule)]
    inner["inputDefinitions"]["parameters"]["run"]["defaultValue"] = value
    assert rules(pipeline) == [("parameter run", rule), ("train, parameter spec", rule)]


@pytest.mark.parametrize(
    ("image", "words"),
    [("repo/x:v1", "names a tag"), (PINNED, "not in the image lock"), (PINNED[:-1], "63 hex digits")],
)
def test_the_image_of_the_pods_that_a_task_launches_is_the_locks(
    pipeline: dict[str, Any], image: str, words: str
) -> None:
    variables = container(pipeline)["env"]
    variables.append({"name": "LONGSTRAW_WORKER_IMAGE", "value": container(pipeline)["image"]})
    assert rules(pipeline) == []
    variables[-1]["value"] = image
    (finding,) = lint_pipeline(pipeline, LOCK)
    assert (finding.task, finding.rule) == ("train", "image")
    assert words in finding.message


def test_a_task_cannot_state_another_image_than_it_runs_in(pipeline: dict[str, Any]) -> None:
    (variable,) = (item for item in container(pipeline)["env"] if item["name"] == "LONGSTRAW_IMAGE")
    variable["value"] = container(pipeline, "sample")["image"]
    (finding,) = lint_pipeline(pipeline, LOCK)
    assert (finding.task, finding.rule) == ("train", "image")
    assert "LONGSTRAW_IMAGE" in finding.message


def test_caching_that_is_on_is_found_in_a_nested_task(pipeline: dict[str, Any]) -> None:
    pipeline["components"]["comp-transaction"]["dag"]["tasks"]["sample"]["cachingOptions"] = {"enableCache": True}
    assert rules(pipeline) == [("sample", "caching")]


def test_a_pipeline_as_the_stock_decorators_make_it_is_refused_on_every_count(tmp_path: Path) -> None:
    @dsl.component(base_image="python:3.11")
    def step(text: str) -> str:
        return text

    @dsl.pipeline
    def stock(text: str = "x") -> str:
        done: Any = step(text=text)
        return done.output

    out = tmp_path / "stock.yaml"
    graph: Any = stock
    compiler.Compiler().compile(graph, str(out))
    found = lint_pipeline(load_pipeline(out.read_bytes(), "stock.yaml"), LOCK)
    assert {(finding.task, finding.rule) for finding in found} == {
        ("step", "image"),
        ("step", "install"),
        ("step", "caching"),
    }


@pytest.mark.parametrize("text", ["a: [", "a: 1", "- 1", ""])
def test_a_file_that_is_no_pipeline_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"some\.yaml: not"):
        load_pipeline(text, "some.yaml")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("deploymentSpec", None),
        ("deploymentSpec.executors", []),
        ("deploymentSpec.executors.exec-train", None),
        ("deploymentSpec.executors.exec-train.container", "x"),
        ("deploymentSpec.executors.exec-train.container.args", [1]),
        ("deploymentSpec.executors.exec-train.container.command", None),
        ("deploymentSpec.executors.exec-train.container.env", ["x"]),
        ("components", None),
        ("components.comp-train.executorLabel", ["x"]),
        ("root", []),
        ("root.dag.tasks", None),
        ("root.dag.tasks.transaction", None),
        ("root.inputDefinitions", None),
        ("components.comp-transaction.dag.tasks.train.cachingOptions", None),
        ("components.comp-transaction.dag.tasks.train.componentRef", {"name": ["x"]}),
        ("components.comp-transaction.dag.tasks.train.inputs.parameters.spec", "x"),
    ],
)
def test_a_part_of_another_kind_is_refused_by_its_path(
    pipeline: dict[str, Any], path: str, value: object, tmp_path: Path
) -> None:
    parent, (*ways, last) = pipeline, path.split(".")
    for way in ways:
        parent = parent[way]
    parent[last] = value
    file = tmp_path / "odd.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    result = CliRunner().invoke(main, ["lint", str(file), "--images", str(IMAGES)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"not a compiled pipeline: {path}" in line


def test_the_command_prints_one_line_per_finding_and_exits_with_2(pipeline: dict[str, Any], tmp_path: Path) -> None:
    container(pipeline)["image"] = "repo/x:v1"
    container(pipeline, "sample")["image"] = PINNED
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(pipeline))
    arguments = ["lint", str(path), "--images", str(IMAGES)]
    plain = CliRunner().invoke(main, arguments)
    assert plain.exit_code == 2
    assert [line.partition(":")[0] for line in plain.stdout.splitlines()] == ["sample", "train"]
    listed = [json.loads(line) for line in CliRunner().invoke(main, [*arguments, "-o", "json"]).stdout.splitlines()]
    assert [line["event"] for line in listed] == ["finding", "finding", "linted"]
    assert listed[1]["task"] == "train"
    assert listed[-1]["findings"] == 2
    clean = CliRunner().invoke(main, ["lint", str(FOLDER / "longstraw.yaml"), "--images", str(IMAGES)])
    assert clean.exit_code == 0


def test_a_lock_with_a_tag_is_refused_by_compile_and_lint(tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text('{"trainer": "repo/x:v1"}')
    out = tmp_path / "out.yaml"
    for arguments in (
        ["compile", str(FOLDER / "default.spec.yaml"), "--images", str(lock), "--out", str(out)],
        ["lint", str(FOLDER / "longstraw.yaml"), "--images", str(lock)],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert "names a tag" in result.stderr
        assert "skopeo" in result.stderr
    assert not out.exists()


def test_aliases_that_expand_without_end_are_refused_at_once() -> None:
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 12)]
    bomb = "\n".join(["a0: &a0 [x]", *levels, "deploymentSpec: {executors: {}}"])
    bomb += "\nroot: {inputDefinitions: {parameters: {p: {defaultValue: *a11}}}, dag: {tasks: {}}}\n"
    with pytest.raises(SpecError, match=r"bomb\.yaml: YAML aliases are not accepted"):
        load_pipeline(bomb, "bomb.yaml")

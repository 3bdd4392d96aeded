"""The compiled pipeline: all stages, in order, nothing cached, nothing installed at run time."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from longstraw_core.cli.compile_pipeline import compile_pipeline
from longstraw_core.spec.parse import parse_transaction_spec
from longstraw_core.stages.catalogue import CATALOGUE, stage_entry

ROOT = Path(__file__).parents[2]
SPEC = """\
name: demo
model: {snapshot: model, family: qwen3_5_text}
data: {path: rows.jsonl}
"""


def compiled(transactions: int = 2, extra: str = "") -> dict[str, Any]:
    content = compile_pipeline(parse_transaction_spec(SPEC + extra, "test"), transactions)
    return next(yaml.safe_load_all(content))


def tasks(pipeline: dict[str, Any]) -> dict[str, Any]:
    return pipeline["components"]["comp-transaction"]["dag"]["tasks"]


def test_every_stage_is_one_task_that_waits_for_the_stages_it_reads() -> None:
    found = tasks(compiled())
    assert set(found) == {name.replace("_", "-") for name in CATALOGUE}
    for entry in CATALOGUE.values():
        task = found[entry.name.replace("_", "-")]
        for upstream in entry.upstream:
            assert upstream.replace("_", "-") in task["dependentTasks"]
            artifact = task["inputs"]["artifacts"][f"{upstream}_receipt"]["taskOutputArtifact"]
            assert artifact["producerTask"] == upstream.replace("_", "-")


def test_capture_waits_for_sampling_only_when_gpus_are_exclusive() -> None:
    assert "sample" in tasks(compiled())["capture-prefix"]["dependentTasks"]
    shared = tasks(compiled(extra="schedule: {exclusive_gpus: false}\n"))
    assert "sample" not in shared["capture-prefix"]["dependentTasks"]


def test_a_transaction_starts_from_the_checkpoint_before_it() -> None:
    chained = compiled(3)["root"]["dag"]["tasks"]
    assert len(chained) == 3
    parent = chained["transaction-2"]["inputs"]["parameters"]["parent_checkpoint"]["taskOutputParameter"]
    assert parent["producerTask"] == "transaction"
    numbers = [task["inputs"]["parameters"]["transaction"]["runtimeValue"]["constant"] for task in chained.values()]
    assert sorted(numbers) == [1, 2, 3]


def test_nothing_is_cached_and_nothing_is_installed_at_run_time() -> None:
    pipeline = compiled()
    for task in tasks(pipeline).values():
        assert not task["cachingOptions"].get("enableCache", False)
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert "pip install" not in " ".join(executor["container"]["command"])


def test_the_pipeline_surface_has_no_optional_parameter() -> None:
    parameters = compiled()["root"]["inputDefinitions"]["parameters"]
    assert {name: field["parameterType"] for name, field in parameters.items()} == {
        "spec": "STRING",
        "run": "STRING",
        "parent_checkpoint": "STRING",
    }
    assert all("defaultValue" in field for field in parameters.values())


def test_an_image_lock_decides_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from components.images import image

    lock = tmp_path / "images.lock.json"
    lock.write_text('{"trainer": "registry.example/longstraw/trainer@sha256:' + "a" * 64 + '"}')
    monkeypatch.setenv("LONGSTRAW_IMAGES_LOCK", str(lock))
    assert image("trainer").endswith("a" * 64)
    assert image("control").startswith("localhost/")


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_component_is_a_shim_with_a_page(name: str) -> None:
    folder = ROOT / "components" / name
    tree = ast.parse((folder / "component.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert len(function.body) <= 3
    page = (folder / "README.md").read_text(encoding="utf-8")
    for output in stage_entry(name).outputs:
        assert f"`{output}`" in page

"""`longstraw plan` on the two large models, the placement of stages of several pods, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from longstraw_core.cli.main import main
from longstraw_core.cli.spec_file import read_spec
from longstraw_core.cluster.placement import Placement
from longstraw_core.cluster.task_config import PodSettings
from longstraw_core.stages.execute import StageRequest
from longstraw_core.stages.launcher import placement_plan

PLANS = Path(__file__).parents[2] / "examples" / "plans"
HYBRID = ["plan", str(PLANS / "qwen3.6-27b.yaml"), "--context-parallel", "8"]
MIXTURE = ["plan", str(PLANS / "glm-5.2.yaml"), "--context-parallel", "32", "--expert-parallel", "32"]
DEVICE = ["--device", str(PLANS / "device-96gb.json")]
DIGEST = "ab" * 32
ON_NODES = [
    *("--set", "storage.uri=s3://team/longstraw", "--set", "layout.context_parallel=16"),
    *("--set", "cluster.stages.train.nodes=2", "--set", "cluster.trainer.accelerators=8"),
    *("--set", "cluster.queue=gpu", "--set", "cluster.stages.train.scheduling_minutes=5"),
]


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    """The option that names an image lock."""
    lock = {role: f"registry.example/longstraw/{role}@sha256:{DIGEST}" for role in ("control", "sampler", "trainer")}
    (tmp_path / "lock.json").write_text(json.dumps(lock), encoding="utf-8")
    return ["--images", str(tmp_path / "lock.json")]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def plan(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("command", "gradient", "fits"),
    [(HYBRID, "stopgrad", True), (HYBRID, "exact", False), (MIXTURE, "stopgrad", True), (MIXTURE, "exact", True)],
)
def test_whether_two_million_tokens_fit_on_accelerators_of_96_gb(command: list[str], gradient: str, fits: bool) -> None:
    found = plan(*command, *DEVICE, "--prompt-tokens", "2097152", "--set", f"objective.gradient={gradient}")
    assert found["fits"] is fits
    assert (found["longest_prompt_tokens"] >= 2_097_152) is fits
    at_limit = plan(
        *command,
        *DEVICE,
        *("--prompt-tokens", str(found["longest_prompt_tokens"])),
        *("--set", f"objective.gradient={gradient}"),
    )
    beyond = plan(
        *command,
        *DEVICE,
        *("--prompt-tokens", str(found["longest_prompt_tokens"] + 1)),
        *("--set", f"objective.gradient={gradient}"),
    )
    assert at_limit["fits"]
    assert not beyond["fits"]


def test_flags_replace_the_files_figures() -> None:
    assert not plan(*HYBRID, *DEVICE, "--prompt-tokens", "8192", "--memory-gb", "48")["fits"]
    slow, fast = (plan(*HYBRID, *DEVICE, "--teraflops", figure)["compute_seconds"] for figure in ("100", "200"))
    assert slow == pytest.approx(2 * fast, rel=1e-3)


def test_without_figures_nothing_is_said_of_fit_or_time() -> None:
    found = plan(*HYBRID)
    assert found["fits"] is None
    assert found["compute_seconds"] is None
    assert found["weights_bytes"] > 50e9
    assert "give --device" in invoke(*HYBRID).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*HYBRID, "--memory-gb", "-1"], "memory_gb"),
        ([*HYBRID, "--teraflops", "100"], "memory_gb"),
        ([*HYBRID, "--memory-gb", "1e308"], "memory_gb"),
        ([*HYBRID, *DEVICE, "--reserved-gb", "200"], "reserved_gb 200 leaves nothing of memory_gb 96"),
        ([*HYBRID, "--run", "../x"], "run name '../x'"),
        ([*HYBRID, "--run", ""], "run name ''"),
        ([*HYBRID, "--namespace", "Bad Name"], "--namespace 'Bad Name'"),
        ([*HYBRID, "--device", "nowhere.json"], "nowhere.json"),
        ([*MIXTURE, "--expert-parallel", "24"], "does not divide"),
        ([*HYBRID, "--context-parallel", "32"], "does not divide the 48 value heads"),
        ([*HYBRID, "--context-parallel", "2", "--expert-parallel", "2"], "this model has no experts"),
        ([*HYBRID, "--context-parallel", "12"], "neither divides the 16 key heads"),
        ([*HYBRID, "--set", "model.snapshot=none"], "config.json"),
        ([*HYBRID, "--set", "model.family=glm_moe_dsa"], "model.family"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 10**30}, "hidden_size is 1000"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"layer_types": [["x"]] * 64}, "layer_types must name"),
        ({"text_config": None}, "text_config must be one JSON object"),
        ({"text_config": [1]}, "text_config must be one JSON object"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_configuration_that_no_model_has_is_one_line(
    content: dict[str, object] | str | bytes, words: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    if isinstance(content, dict):
        known = json.loads((PLANS / "qwen3.6-27b" / "config.json").read_text(encoding="utf-8"))
        config.write_text(json.dumps(known | content), encoding="utf-8")
    else:
        config.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = invoke("plan", str(PLANS / "qwen3.6-27b.yaml"), "--set", f"model.snapshot={tmp_path}", *DEVICE)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_placement_of_a_stage_of_several_pods_is_the_launchers(images: list[str]) -> None:
    command = ["plan", str(PLANS / "qwen3.6-27b.yaml"), *ON_NODES, *images, "--run", "demo", "--namespace", "team"]
    (placed,) = plan(*command)["placements"]
    spec = read_spec(PLANS / "qwen3.6-27b.yaml", tuple(ON_NODES[1::2]))
    launched = placement_plan(
        StageRequest(stage="train", spec=spec, run="demo", transaction=1),
        namespace="team",
        image=f"registry.example/longstraw/trainer@sha256:{DIGEST}",
        placement=Placement(nodes=2),
        pod=PodSettings(),
    )
    assert (placed["stage"], placed["name"], placed["image"]) == ("train", launched.name, launched.image)
    assert (placed["pods"], placed["processes"], placed["processes_per_pod"]) == (2, 16, 8)
    assert placed["rendezvous"] == f"{launched.pod_host(0)}:29500"
    assert placed["hosts"] == [launched.pod_host(0), launched.pod_host(1)]
    assert placed["resources_per_pod"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert (placed["queue"], placed["scheduling_seconds"]) == ("gpu", 300)
    table = invoke(*command).stdout
    assert "Placement of train" in table
    for text in (f"team/{launched.name}", "2, one per node", "16 (8 per pod)", "scheduling within 300 s"):
        assert text in table
    assert launched.name not in invoke(*command, "--transaction", "2").stdout


def test_a_specification_without_stages_of_several_pods_has_no_placement(images: list[str]) -> None:
    assert plan(*HYBRID, *images)["placements"] == []
    assert "Placement" not in invoke(*HYBRID).stdout


def test_pods_without_published_images_are_not_planned_and_the_rest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSTRAW_IMAGES_LOCK", raising=False)
    monkeypatch.setattr("components.images.DEFAULT_IMAGE_LOCK", Path("nowhere.json"))
    result = invoke("plan", str(PLANS / "qwen3.6-27b.yaml"), *ON_NODES)
    assert result.exit_code == 0
    assert "Plan of one prompt" in result.stdout
    assert "the pods of train are not planned" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context-parallel", "8"], "8 is 4 ranks per pod, and a pod has 8 accelerators"),
        (["--set", "cluster.stages.train.nodes=3"], "cannot be dealt evenly"),
        (["--set", "cluster.stages.sample.nodes=2"], "samples in one pod"),
        (["--set", "storage.uri=file:///data"], "directory of one machine"),
    ],
)
def test_a_placement_that_cannot_be_is_one_line(arguments: list[str], words: str, images: list[str]) -> None:
    result = invoke("plan", str(PLANS / "qwen3.6-27b.yaml"), *ON_NODES, *images, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1

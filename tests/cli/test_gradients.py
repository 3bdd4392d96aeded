"""`longstraw gradients`: equal to conventional training, and every bad input one line with exit code 2."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longstraw_core.cli.main import main
from longstraw_core.engine.policy import Policy
from longstraw_core.spec.transaction import LoraSpec
from longstraw_core.training.lora import inject_adapter, save_adapter, trainable_parameters
from tests.engine.oracle import VOCABULARY, full_logprobs, relative_error, tiny_base

LAYERS = ("linear_attention", "full_attention", "linear_attention")
PROMPT = [index * 7 % VOCABULARY for index in range(60)]
RESPONSES = [[1, 2, 3, 4, 5], [9, 8], [7]]
ADVANTAGES = [1.0, -0.5, -0.5]


def adapted() -> PeftModel:
    model = inject_adapter(tiny_base(LAYERS, max_position_embeddings=128), LoraSpec(rank=2, alpha=4.0), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` and `adapter`."""
    root = tmp_path_factory.mktemp("stored")
    tiny_base(LAYERS, max_position_embeddings=128).save_pretrained(root / "model")
    save_adapter(adapted(), root / "adapter")
    return root


def batch_fields(**changes: Any) -> dict[str, Any]:
    responses = [
        {"token_ids": tokens, "advantage": advantage, "old_logprobs": None}
        for tokens, advantage in zip(RESPONSES, ADVANTAGES, strict=True)
    ]
    return {"prompt_token_ids": PROMPT, "responses": responses} | changes


def invoke(root: Path, tmp_path: Path, batch: Any, *options: str, gradient: str = "exact") -> Result:
    path = tmp_path / "batch.json"
    path.write_text(batch if isinstance(batch, str) else json.dumps(batch))
    paths = ["--model", str(root / "model"), "--adapter", str(root / "adapter"), "--batch", str(path)]
    out = ["--out", str(tmp_path / "gradients.safetensors")]
    return CliRunner().invoke(main, ["gradients", *paths, "--gradient", gradient, *out, "--chunk", "25", *options])


Aggregate = Callable[[torch.Tensor, int], torch.Tensor]
AGGREGATIONS: dict[str, Aggregate] = {
    "sequence_mean": lambda loss_R, _: loss_R.mean() / 3,
    "token_mean": lambda loss_R, tokens: loss_R.sum() / tokens,
    "dr_grpo": lambda loss_R, _: loss_R.sum() / (3 * 16),
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_gradient_equals_conventional_training(
    stored: Path, tmp_path: Path, aggregation: str, off_policy: bool
) -> None:
    model = adapted()
    fields = batch_fields(aggregation=aggregation, clip=[0.1, 0.3])
    if aggregation == "dr_grpo":
        fields["max_response_tokens"] = 16
    loss_in_all = 0.0
    for number, (response, advantage) in enumerate(zip(RESPONSES, ADVANTAGES, strict=True)):
        logprobs_R = full_logprobs(model, PROMPT, response)
        old_R = logprobs_R.detach()
        if off_policy and number != 1:
            old_R = (old_R + torch.linspace(-0.5, 0.5, len(response))).clamp(max=0.0)
            fields["responses"][number]["old_logprobs"] = old_R.tolist()
        ratio_R = torch.exp(logprobs_R - old_R)
        loss_R = -torch.minimum(ratio_R * advantage, ratio_R.clamp(0.9, 1.3) * advantage)
        loss = AGGREGATIONS[aggregation](loss_R, sum(map(len, RESPONSES)))
        loss_in_all += float(loss.detach())
        loss.backward()
    expected = {name: parameter.grad for name, parameter in trainable_parameters(model).items()}
    result = invoke(stored, tmp_path, fields, "-o", "json")
    assert result.exit_code == 0, result.output
    written = load_file(tmp_path / "gradients.safetensors")
    assert all(name.startswith("base_model.model.") and name.endswith(".weight") for name in written)
    assert all(value.dtype == torch.float32 for value in written.values())
    assert relative_error(written, expected) <= 2e-5  # type: ignore[arg-type]
    printed = json.loads(result.stdout)
    assert printed["loss"] == pytest.approx(loss_in_all, abs=1e-5)
    assert [len(values) for values in printed["logprobs"]] == [5, 2, 1]
    norm = sum(float(value.pow(2).sum()) for value in written.values()) ** 0.5
    assert printed["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert printed["peak_memory_bytes"] > 0
    assert set(printed["seconds"]) == {"capture", "logprobs", "replay", "reverse_sweep", "finalise"}


def change_tensor(path: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if part in name)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, path, metadata={"format": "pt"})


def change_config(root: Path, **changes: Any) -> None:
    path = root / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def other_rank(root: Path) -> None:
    path = root / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 4}))


def other_architecture(root: Path) -> None:
    path = root / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ["kv_a_proj_with_mqa"]}))


WEIGHTS, ADAPTER = Path("model/model.safetensors"), Path("adapter/adapter_model.safetensors")
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "adapter of another rank": (other_rank, "has shape"),
    "adapter for another architecture": (other_architecture, "kv_a_proj_with_mqa"),
    "empty adapter tensor": (
        lambda root: change_tensor(root / ADAPTER, "q_proj.lora_A", lambda _: torch.zeros(0)),
        "q_proj.lora_A.weight has shape (0,)",
    ),
    "missing adapter tensor": (lambda root: change_tensor(root / ADAPTER, "q_proj.lora_A", lambda _: None), "missing"),
    "missing tensor": (lambda root: change_tensor(root / WEIGHTS, "k_proj", lambda _: None), "lacks tensor"),
    "misshapen tensor": (lambda root: change_tensor(root / WEIGHTS, "k_proj", lambda x: x[:-1].clone()), "has shape"),
    "unknown layer type": (
        lambda root: change_config(root, layer_types=["linear_attention", "sliding_attention", "linear_attention"]),
        "sliding_attention",
    ),
    "unsupported rope type": (
        lambda root: change_config(
            root,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        "rope type 'linear'",
    ),
    "rope theta that is no number": (
        lambda root: change_config(
            root, rope_parameters={"rope_type": "default", "rope_theta": "many", "partial_rotary_factor": 0.25}
        ),
        "cannot be loaded",
    ),
    "layer types of fewer layers": (lambda root: change_config(root, layer_types=["full_attention"]), "config.json"),
    "a size that is no number": (lambda root: change_config(root, hidden_size="wide"), "hidden_size"),
    "configuration that is no object": (lambda root: replace(root / "model/config.json", b"null"), "config.json"),
    "configuration nested too deep": (
        lambda root: replace(root / "model/config.json", b"[" * 100_000),
        "config.json",
    ),
    "unknown activation": (lambda root: change_config(root, hidden_act="zzz"), "zzz"),
    "quantised snapshot": (
        lambda root: change_config(root, quantization_config={"quant_method": "fp8"}),
        "is quantised",
    ),
    "adapter configuration that is no object": (
        lambda root: replace(root / "adapter/adapter_config.json", b"[]"),
        "must be a JSON object",
    ),
    "adapter configuration nested too deep": (
        lambda root: replace(root / "adapter/adapter_config.json", b"[" * 100_000),
        "no readable adapter configuration",
    ),
    "integer adapter tensor": (
        lambda root: change_tensor(root / ADAPTER, "q_proj.lora_A", lambda x: x.to(torch.int32)),
        "is stored as torch.int32",
    ),
    "another model type": (lambda root: change_config(root, model_type="qwen3"), "model type 'qwen3'"),
    "no model": (lambda root: shutil.rmtree(root / "model"), "config.json"),
    "no adapter": (lambda root: shutil.rmtree(root / "adapter"), "adapter_config.json"),
}


def refused(result: Result, message: str, tmp_path: Path) -> None:
    assert result.exit_code == 2, result.output
    assert message in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("longstraw:")]
    assert len(lines) == 1, result.output
    assert not (tmp_path / "gradients.safetensors").exists()


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing is the first thing that allocates pages: it must not be reached."""

    def capture(*_: object, **__: object) -> None:
        raise AssertionError("pages were about to be allocated")

    monkeypatch.setattr(Policy, "capture", capture)


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_foreign_files_are_refused(stored: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(stored, tmp_path / "copy")
    change, message = DAMAGE[damage]
    change(tmp_path / "copy")
    refused(invoke(tmp_path / "copy", tmp_path, batch_fields()), message, tmp_path)


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (batch_fields(prompt_token_ids=[1, VOCABULARY]), [], f"token id {VOCABULARY} at position 1"),
        (batch_fields(responses=[{"token_ids": [VOCABULARY], "advantage": 1}]), [], "responses[0].token_ids: token id"),
        (batch_fields(responses=[{"token_ids": [], "advantage": 1}]), [], "responses[0].token_ids"),
        (batch_fields(responses=[{"token_ids": [1] * 90, "advantage": 1}]), [], "the model has 128"),
        (batch_fields(responses=[{"token_ids": [1], "advantage": 1, "old_logprobs": [-1, -1]}]), [], "2 old_logprobs"),
        ('{"prompt_token_ids": [1], "responses": [{"token_ids": [1], "advantage": NaN}]}', [], "NaN"),
        (batch_fields(), ["--cp", "3", "--ep", "2"], "--ep 2: does not divide --cp 3"),
        (batch_fields(), ["--ep", "4"], "--ep 4"),
        (batch_fields(), ["--out", "{root}/model/model.safetensors"], "belongs to the input"),
        (batch_fields(), ["--out", "{root}/adapter/gradients.safetensors"], "belongs to the input"),
        (batch_fields(), ["--out", "{tmp}/batch.json"], "belongs to the input"),
        (batch_fields(), ["--out", "{tmp}/batch.json/gradients.safetensors"], "is not a directory"),
    ],
)
def test_a_bad_batch_or_option_is_refused(
    stored: Path, tmp_path: Path, batch: Any, options: list[str], message: str
) -> None:
    given = [option.format(root=stored, tmp=tmp_path) for option in options]
    refused(invoke(stored, tmp_path, batch, *given), message, tmp_path)


def test_nf4_without_bitsandbytes_is_refused(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    result = invoke(stored, tmp_path, batch_fields(), "--quantization", "nf4")
    refused(result, "nf4 needs the package bitsandbytes", tmp_path)


@pytest.mark.usefixtures("no_pages")
def test_an_output_that_is_no_regular_file_is_refused_and_stays(stored: Path, tmp_path: Path) -> None:
    """As root a rename onto a device node succeeds: `--out /dev/null` would have replaced it for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for place in (pipe, tmp_path / "link"):
        refused(invoke(stored, tmp_path, batch_fields(), "--out", str(place)), "is not a regular file", tmp_path)
        assert pipe.is_fifo()


@pytest.mark.usefixtures("no_pages")
def test_a_chunk_no_integer_of_a_layout_holds_is_refused(stored: Path, tmp_path: Path) -> None:
    result = invoke(stored, tmp_path, batch_fields(), "--chunk", str(2**63))
    assert result.exit_code == 2
    assert "--chunk" in result.output


def test_a_file_that_was_there_stays_when_the_command_fails(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "gradients.safetensors"
    out.write_bytes(b"before")
    assert invoke(stored, tmp_path, batch_fields(prompt_token_ids=[VOCABULARY])).exit_code == 2
    assert out.read_bytes() == b"before"
    shown = invoke(stored, tmp_path, batch_fields(), gradient="stopgrad")
    assert shown.exit_code == 0, shown.output
    assert "gradient stopgrad" in shown.output
    assert len(load_file(out)) == len(trainable_parameters(adapted()))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


def test_two_ranks_give_the_gradient_of_one_and_with_weights_in_shares_the_same_bits(
    stored: Path, tmp_path: Path
) -> None:
    results = {}
    for name, options in {
        "1": ["--cp", "1"],
        "2": ["--cp", "2"],
        "s": ["--cp", "2", "--base-weights", "sharded"],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        result = invoke(stored, folder, batch_fields(), *options, "-o", "json")
        assert result.exit_code == 0, result.output
        printed = json.loads(result.stdout.splitlines()[-1])
        results[name] = (printed, load_file(Path(printed["out"])))
    (alone, expected), (together, ours) = results["1"], results["2"]
    assert results["s"][0]["loss"] == together["loss"]
    assert all(torch.equal(results["s"][1][name], value) for name, value in ours.items())
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert together["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-4)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert float((ours[name] - value).norm()) <= 1e-4 * float(value.norm()), name

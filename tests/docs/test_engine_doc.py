"""Every command in docs/engine.md runs as it is written there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from longstraw_core.cli.main import main
from longstraw_core.spec.transaction import LoraSpec, ModelSpec
from longstraw_core.training.lora import inject_adapter, save_adapter
from longstraw_core.training.model import load_base_model

DOCUMENT = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^longstraw (.+)$", DOCUMENT, re.MULTILINE)


def test_there_are_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"parity", "gradients"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(
    command: str, untrained_snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if command.startswith("gradients"):
        shutil.copytree(untrained_snapshot, "tiny-model")
        spec = ModelSpec(snapshot="tiny-model", family="qwen3_5_text", dtype="float32")
        save_adapter(
            inject_adapter(load_base_model(Path("tiny-model"), spec), LoraSpec(rank=4), seed=0), Path("adapter")
        )
        (json_block,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
        Path("batch.json").write_text(json_block)
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == 0, result.output
    if command.startswith("gradients"):
        assert Path("gradients.safetensors").is_file()

"""The KFP shim's contract: artifacts in and out, digests checked, failures as exit codes and events."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.spec import Descriptor, canonical_json
from longstraw_core.stages.component import run_component
from longstraw_core.stages.events import EVENT_FILE_VARIABLE

from .scripted import make_spec, run_transaction


@dataclass
class Artifact:
    """What KFP hands to a component: a path, a URI and flat metadata."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return self.path

    def log_metric(self, name: str, value: float) -> None:
        self.metadata[name] = value


def outputs(directory: Path) -> dict[str, Artifact]:
    return {name: Artifact(str(directory / name)) for name in ("receipt", "summary", "metrics", "report")}


@pytest.fixture
def arguments(spec_fields: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    spec = make_spec(spec_fields)
    return {
        "spec": canonical_json(spec).decode(),
        "run": spec.name,
        "transaction": 1,
        "parent_checkpoint": "",
        **outputs(tmp_path / "kfp"),
    }


def test_the_receipt_the_summary_and_the_metrics_are_written(arguments: dict[str, Any]) -> None:
    first_output = Descriptor.model_validate_json(run_component("audit_data", arguments))
    receipt = arguments["receipt"]
    content = Path(receipt.path).read_bytes()
    assert receipt.metadata["sha256"] == "sha256:" + hashlib.sha256(content).hexdigest()
    assert all(isinstance(value, str) for value in receipt.metadata.values())
    assert json.loads(content)["predicate"]["outputs"]["prompts"]["digest"] == first_output.digest
    summary = Path(arguments["summary"].path).read_text(encoding="utf-8")
    assert summary.startswith("# audit")
    assert "exact" in summary
    assert arguments["metrics"].metadata["data/rows"] == 8
    assert not Path(arguments["report"].path).exists()


def test_a_stage_with_a_report_writes_it_as_html(spec_fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    outcomes = run_transaction(make_spec(spec_fields))
    for stage in ("audit_data", "export_lora", "score_rewards", "capture_prefix", "old_logprobs"):
        path = Path(arguments["receipt"].path).parent / f"{stage}-in"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = canonical_json(outcomes[stage].receipt)
        path.write_bytes(content)
        arguments[f"{stage}_receipt"] = Artifact(str(path), {"sha256": outcomes[stage].descriptor.digest})
    run_component("train", arguments)
    assert Path(arguments["report"].path).read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_a_changed_receipt_between_two_components_ends_with_11_and_one_event(
    spec_fields: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_component("audit_data", arguments)
    receipt = arguments["receipt"]
    content = bytearray(Path(receipt.path).read_bytes())
    content[40] ^= 1
    Path(receipt.path).write_bytes(bytes(content))
    events = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENT_FILE_VARIABLE, str(events))
    with pytest.raises(SystemExit) as ended:
        run_component("export_lora", {**arguments, "audit_data_receipt": receipt, **outputs(tmp_path / "next")})
    assert ended.value.code == 11
    event = json.loads(events.read_text(encoding="utf-8").splitlines()[-1])
    assert (event["event"], event["error"], event["exit_code"]) == ("stage_failed", "IntegrityError", 11)
    assert "receipt of audit_data" in event["message"]
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        ({"spec": "not json"}, 2, "parameter spec"),
        ({"spec": "{}"}, 2, "required field is missing"),
        ({"transaction": 0}, 2, "transaction"),
        ({"parent_checkpoint": "{}"}, 2, "parent_checkpoint"),
        ({"run": "../escape"}, 2, "run name"),
    ],
)
def test_bad_parameters_end_with_2(
    arguments: dict[str, Any], change: dict[str, Any], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_component("audit_data", arguments | change)
    assert ended.value.code == code
    assert part in capsys.readouterr().err


def test_an_unexpected_error_counts_as_a_failed_stage(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from longstraw_core.stages import audit_data

    def broken(_context: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(audit_data, "execute", broken)
    with pytest.raises(SystemExit) as ended:
        run_component("audit_data", arguments)
    assert ended.value.code == 3
    assert "a bug of ours" in capsys.readouterr().err


def test_an_image_of_another_role_is_refused_before_any_work(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("LONGSTRAW_IMAGE_ROLE", "trainer")
    with pytest.raises(SystemExit) as stopped:
        run_component("audit_data", arguments)
    assert stopped.value.code == 2
    assert "needs the image of role control" in capsys.readouterr().err
    assert not list(tmp_path.glob("kfp/*"))

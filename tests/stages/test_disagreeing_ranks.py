"""`train` on two real ranks of which one goes wrong: the error names it, nothing is published, nothing is left."""

import time
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.artifacts import find_receipt, open_store
from longstraw_core.spec import LongStrawError, NumericError, StageFailed, TransactionSpec
from longstraw_core.stages import ranked
from longstraw_core.training.launch import run_ranks
from longstraw_core.training.rank_task import RankTask
from tests.conftest import make_row
from tests.stages.faulty_ranks import FAULT
from tests.stages.scripted import BEFORE_SAMPLE, group_rollouts, make_spec, prompts_of, publish_rollouts, run
from tests.training.test_launch import processes_naming


@pytest.fixture(scope="module")
def ready_to_train(untrained_snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> TransactionSpec:
    """A transaction with everything but its train stage."""
    from longstraw_core.spec import canonical_json

    folder = tmp_path_factory.mktemp("disagreeing")
    (folder / "rows.jsonl").write_bytes(b"".join(canonical_json(make_row(number)) + b"\n" for number in (11, 12)))
    spec = make_spec(
        {
            "name": "disagreeing",
            "model": {"snapshot": str(untrained_snapshot), "family": "qwen3_5_text", "dtype": "float32"},
            "lora": {"rank": 2, "targets": "attention"},
            "data": {"path": str(folder / "rows.jsonl")},
            "sampling": {"group_size": 4, "max_response_tokens": 6, "faithfulness": {"mean_limit": 50.0}},
            "layout": {"prompt_chunk_tokens": 24, "page_tokens": 16, "rank_timeout_seconds": 8},
            "storage": {"uri": (folder / "store").as_uri()},
        }
    )
    for stage in BEFORE_SAMPLE:
        run(spec, stage)
    (prompt,) = prompts_of(spec)
    answers = [f"Answer: {prompt.ground_truth}"] * 2 + ["Answer: 0"] * 2
    publish_rollouts(spec, group_rollouts(prompt, answers))
    for stage in ("score_rewards", "capture_prefix", "old_logprobs"):
        run(spec, stage)
    return spec


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("drift", NumericError, "adapter after the step is sha256:.* on rank 1 and sha256:.* on rank 0"),
        ("slots", StageFailed, r"ranks \[0, 2\] reported, expected 0 to 1 in order"),
        ("device", StageFailed, "ranks 0 and 1 share accelerator GPU-7"),
        ("phases", StageFailed, "rank 1 went through load → restore → replay → finalise .*, rank 0 through .*sweep"),
        ("order", StageFailed, "rank 1 of 2 on .*: in phase finalise: PhaseOrderError: phase load cannot follow"),
        ("memory", StageFailed, "rank 1 of 2 on .*: out of memory in phase replay"),
        ("hang", StageFailed, "rank 1 of 2 on .*: did not answer the other ranks within 8 s; .*in phase replay"),
    ],
)
def test_a_rank_that_goes_wrong_fails_the_transaction(
    ready_to_train: TransactionSpec,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[LongStrawError],
    words: str,
) -> None:
    spec = ready_to_train
    meeting: list[Path] = []

    def with_fault(task: RankTask, directory: Path, **options: Any) -> list[bytes | None]:
        meeting.append(directory)
        entry = "tests.stages.faulty_ranks:execute_rank"
        return run_ranks(task.model_copy(update={"entry": entry}), directory, **options)

    monkeypatch.setenv(FAULT, fault)
    monkeypatch.setattr(ranked, "run_ranks", with_fault)
    store = open_store(spec.storage.uri)
    before = sorted(path for path in Path(spec.storage.uri.removeprefix("file://")).rglob("*") if path.is_file())
    started = time.monotonic()
    with pytest.raises(error, match=words):
        run(spec, "train", ranks=2)
    assert time.monotonic() - started < 60 + 60, "the start of ranks on a busy machine included"
    assert find_receipt(store, spec.name, 1, "train") is None
    after = sorted(path for path in Path(spec.storage.uri.removeprefix("file://")).rglob("*") if path.is_file())
    assert [path for path in after if path not in before] == []
    assert processes_naming(meeting[0]) == []

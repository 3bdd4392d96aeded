"""What many tests share: an untrained snapshot, short rows, and a specification over them."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.seaweedfs import S3Server, seaweedfs

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROW_TEXT = "valve flow={} ok\npump load=7 slow\ncode final={}\nWhat is the final code? End with a line `Answer: N`."


def make_row(number: int, truth: str | None = None) -> dict[str, Any]:
    """One short row in the DAPO schema; different numbers give different prompts."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": ROW_TEXT.format(number, number)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number) if truth is None else truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"row-{number}"},
    }


@pytest.fixture(scope="session")
def untrained_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Hugging Face snapshot of the small hybrid with random weights."""
    from longstraw_core.training.tiny.model import build_tiny_model

    directory = tmp_path_factory.mktemp("snapshot") / "model"
    build_tiny_model(directory, curriculum=())
    return directory


@pytest.fixture(scope="session")
def multimodal_snapshot(untrained_snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same language model in the multimodal class that published snapshots have."""
    from tests.support.multimodal import write_multimodal

    return write_multimodal(untrained_snapshot, tmp_path_factory.mktemp("multimodal") / "model")


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server on loopback with one bucket, `artifacts`; every test takes a prefix of its own."""
    with seaweedfs(tmp_path_factory.mktemp("weed") / "server") as server:
        server.client().create_bucket(Bucket="artifacts")
        yield server


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows to `rows.jsonl` in the test's directory."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def spec_fields(untrained_snapshot: Path, write_rows: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """The plain fields of a small specification with two prompts a transaction and groups of four."""
    write_rows([make_row(number) for number in range(11, 19)])
    return {
        "name": "small",
        "seed": 3,
        "model": {"snapshot": str(untrained_snapshot), "family": "qwen3_5_text", "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8.0, "targets": "all"},
        "data": {"path": str(tmp_path / "rows.jsonl"), "prompts_per_transaction": 2},
        # the limit is for tests that write responses and their log-probabilities instead of sampling them
        "sampling": {"group_size": 4, "max_response_tokens": 6, "faithfulness": {"mean_limit": 50.0}},
        "optimizer": {"learning_rate": 0.01},
        "layout": {"prompt_chunk_tokens": 24, "page_tokens": 16},
        "storage": {"uri": (tmp_path / "store").as_uri()},
    }


@pytest.fixture
def spec_file(spec_fields: dict[str, Any], tmp_path: Path) -> Path:
    """The same specification as a file."""
    path = tmp_path / "transaction.yaml"
    path.write_text(json.dumps(spec_fields), encoding="utf-8")
    return path

"""A byte-level tokenizer with a chat template, and rows in the DAPO schema."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.rewards.math_equality import MathScorer

Rows = Callable[[list[Any]], Path]


def dapo_row(content: str = "What is 6 * 7?", truth: Any = "42", **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": content}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
    }
    return row | changes


@pytest.fixture
def rows_file(tmp_path: Path) -> Rows:
    """Write rows (objects, or raw lines as bytes) to a JSONL file."""

    def write(rows: list[Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="session")
def byte_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot directory with one token per byte, 256 to 258 being special, and 64 positions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"<|start|>": 256, "<|end|>": 257, "<|assistant|>": 258}
    tokenizer = Tokenizer(models.BPE(letters | special, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",  # noqa: S106
        additional_special_tokens=["<|start|>", "<|assistant|>"],
        model_max_length=32,
    )
    fast.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
        "{% for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    snapshot = tmp_path_factory.mktemp("snapshot")
    fast.save_pretrained(snapshot)
    (snapshot / "config.json").write_text(
        json.dumps({"text_config": {"max_position_embeddings": 64, "vocab_size": 259}})
    )
    return snapshot


@pytest.fixture(scope="session")
def math_scorer() -> Iterator[MathScorer]:
    """One scorer with one worker for all tests that do not ask about workers."""
    with MathScorer(deadline_seconds=60.0, workers=1) as scorer:
        yield scorer

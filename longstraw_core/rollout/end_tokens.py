"""Which token ids end a response: the same answer for every engine, from the snapshot's own files."""

import json
from pathlib import Path
from typing import Any

from longstraw_core.spec import DataRefused


def read_end_tokens(snapshot: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of `generation_config.json`, else of `config.json`, else the tokenizer's.

    Args:
        snapshot: Hugging Face snapshot directory.
        tokenizer: its tokenizer; only `eos_token_id` is asked for.

    Raises:
        DataRefused: nothing names an end-of-sequence token.
    """
    configured: Any = None
    for name in ("generation_config.json", "config.json"):
        path = snapshot / name
        if path.is_file():
            fields = json.loads(path.read_bytes())
            configured = fields.get("eos_token_id", fields.get("text_config", {}).get("eos_token_id"))
            break
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        raise DataRefused(
            f"{snapshot}: neither generation_config.json nor the tokenizer names an end-of-sequence token"
        )
    return tuple(int(token) for token in (configured if isinstance(configured, list) else [configured]))

"""Writes rows of the recall task: long ledgers with one question each, in the DAPO row schema.

    python examples/recall/generate.py --out examples/recall/rows.jsonl [--rows 64] [--min-tokens 2048] [--seed 0]

The same arguments give the same bytes. The ground truth is the number on the ledger's line `code final=NN`; another
line, `code draft=NN`, is there to mislead.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longstraw_core.training.tiny.ledger import fit_ledger, question
from longstraw_core.training.tiny.tokenizer import build_tokenizer


def recall_rows(rows: int, min_tokens: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `rows` rows whose prompts have at least `min_tokens` tokens after the tiny model's chat template."""
    tokenizer = build_tokenizer()

    def count_tokens(message: str) -> int:
        chat = [{"role": "user", "content": message}]
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])

    for index in range(rows):
        rng = random.Random(f"recall {seed} {index}")  # noqa: S311 - data, not secrets
        ledger = fit_ledger(rng, min_tokens, count_tokens)
        yield {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": question(ledger, "open")}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(ledger.final), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"recall-{seed}-{index}"},
        }


def write_rows(out: Path, rows: int, min_tokens: int, seed: int) -> None:
    """Write the rows as JSON lines; the file appears complete or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".part")
    with unfinished.open("w", encoding="utf-8", newline="\n") as stream:
        for row in recall_rows(rows, min_tokens, seed):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(unfinished, out)


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--rows", type=int, default=64, help="number of rows (default %(default)s)")
    parser.add_argument("--min-tokens", type=int, default=2048, help="shortest prompt (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.min_tokens < 1:
        parser.error("--rows and --min-tokens must be at least 1")
    write_rows(arguments.out, arguments.rows, arguments.min_tokens, arguments.seed)
    sys.stderr.write(f"{arguments.out}: {arguments.rows} rows, prompts of at least {arguments.min_tokens} tokens\n")


if __name__ == "__main__":
    main()

"""Converts GSM8K's JSON lines (question, answer) to the DAPO row schema; the ground truth follows `####`.

    python examples/gsm8k/convert.py SOURCE.jsonl --out examples/gsm8k/rows.jsonl [--rows 64]

The first rows are taken in the order of the source. The same source gives the same bytes.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
REMINDER = '\n\nRemember to put your answer on its own line after "Answer:".'


def convert_row(source: dict[str, Any], index: int) -> dict[str, Any]:
    """Return one DAPO-style row.

    Raises:
        ValueError: the answer does not end in `#### INTEGER`.
    """
    found = re.fullmatch(r"(?s).*####\s*(-?[0-9][0-9,]*)\s*", source["answer"])
    if found is None:
        raise ValueError("answer does not end in '#### INTEGER'")
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": INSTRUCTION + source["question"] + REMINDER}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(int(found[1].replace(",", ""))), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"gsm8k-test-{index}"},
    }


def convert_file(source: Path, out: Path, rows: int) -> int:
    """Convert the first `rows` lines of `source`; return how many were written. `out` appears complete or not at all.

    Raises:
        ValueError: naming file and line, when a line is not a GSM8K row.
    """
    converted: list[str] = []
    with source.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if len(converted) == rows:
                break
            try:
                row = convert_row(json.loads(line), number - 1)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{source}:{number}: not a GSM8K row: {error}") from error
            converted.append(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished = out.with_name(out.name + ".part")
    unfinished.write_text("".join(converted), encoding="utf-8", newline="\n")
    os.replace(unfinished, out)
    return len(converted)


def main() -> None:
    """Parse the command line and convert the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("source", type=Path, help="GSM8K JSONL file")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--rows", type=int, default=64, help="number of rows (default %(default)s)")
    arguments = parser.parse_args()
    try:
        written = convert_file(arguments.source, arguments.out, arguments.rows)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.stderr.write(f"{arguments.out}: {written} rows\n")


if __name__ == "__main__":
    main()

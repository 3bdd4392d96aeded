"""Stand-ins for command-line tools: they write down how they were called and answer what they were told."""

import json
import sys
from pathlib import Path


def fake(directory: Path, name: str, answer: str = "", status: int = 0) -> None:
    """Put a program there that notes its arguments and standard input, prints `answer` and exits with `status`."""
    path = directory / name
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "given = '' if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()\n"
        f"with open({str(directory / 'calls.jsonl')!r}, 'a') as notes:\n"
        f"    notes.write(json.dumps([{name!r}, *sys.argv[1:], given]) + '\\n')\n"
        f"sys.stdout.write({answer!r})\n"
        f"sys.exit({status})\n",
        encoding="utf-8",
    )
    path.chmod(0o755)


def calls(directory: Path) -> list[list[str]]:
    return [json.loads(line) for line in (directory / "calls.jsonl").read_text(encoding="utf-8").splitlines()]

"""What commands print: a table for people or one JSON object per line, on standard output and nothing else there."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""

OutputFormat = Literal["table", "json"]


def print_json(record: Mapping[str, Any]) -> None:
    """Write one JSON object on one line and flush, so that a reader of the pipe sees it at once."""
    sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
    sys.stdout.flush()


def human_bytes(count: int | float) -> str:
    """`1536` → `1.5 KiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """`75.2` → `1m15s`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def printable(text: str) -> str:
    """Text whose control characters are shown as escapes, so that a name from a store cannot forge output."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def console() -> Console:
    """Standard output for people; no colour codes, and room for a wide table, where it is not a terminal."""
    return Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def make_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> Table:
    """Build a plain table; cell text is never interpreted as markup."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table

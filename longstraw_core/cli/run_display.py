"""How a running pipeline looks to a person or a program: events in, lines, tables or JSON out."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from longstraw_core.cli.output import console, human_bytes, human_seconds, make_table, print_json

Event = dict[str, Any]

HEARTBEAT_SECONDS = 15.0


@dataclass
class TransactionRow:
    """The figures of one transaction that people watch, gathered from its stages' metrics."""

    transaction: int
    gradient: str = ""
    status: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_bytes: int = 0

    COLUMNS = (
        "transaction",
        "reward",
        "solved",
        "skipped",
        "loss",
        "grad norm",
        "KL to old",
        "gradient",
        "status",
        "peak memory",
        "time",
    )

    def add(self, event: Event) -> None:
        """Take over what a `stage_finished` event says."""
        self.metrics.update(event.get("metrics", {}))
        self.seconds += float(event.get("seconds", 0.0))
        self.peak_memory_bytes = max(self.peak_memory_bytes, int(event.get("peak_memory_bytes", 0)))
        self.gradient = str(event.get("gradient", self.gradient))
        if event.get("stage") == "train":
            self.status = str(event.get("status", ""))

    def cells(self) -> list[str]:
        """Table cells in the order of `COLUMNS`; a dash where a figure does not exist."""

        def figure(name: str, pattern: str = "{:.4g}") -> str:
            return pattern.format(self.metrics[name]) if name in self.metrics else "-"

        groups = figure("groups/count", "{:.0f}")
        return [
            str(self.transaction),
            figure("reward", "{:+.3f}"),
            f"{figure('groups/solved', '{:.0f}')}/{groups}",
            f"{figure('groups/skipped', '{:.0f}')}/{groups}",
            figure("loss"),
            figure("grad_norm"),
            figure("kl_to_old", "{:.2g}"),
            self.gradient,
            self.status,
            human_bytes(self.peak_memory_bytes),
            human_seconds(self.seconds),
        ]

    def as_json(self) -> dict[str, Any]:
        """The same figures as one JSON object."""
        return {
            "event": "transaction",
            "transaction": self.transaction,
            "gradient": self.gradient,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
            "metrics": self.metrics,
        }


class RunDisplay(Protocol):
    """Receives every event of a run, and the idle ticks between them."""

    def event(self, event: Event) -> None:
        """Show one event."""
        ...

    def tick(self) -> None:
        """Nothing happened for a moment: keep the person informed."""
        ...

    def close(self) -> None:
        """The run ended."""
        ...


class JsonDisplay:
    """One JSON object per line: stage events as they are, plus one `transaction` object per transaction."""

    def __init__(self) -> None:
        self._rows: dict[int, TransactionRow] = {}

    def event(self, event: Event) -> None:
        """Print the event, and the transaction's figures after its last stage."""
        print_json(event)
        if event["event"] == "stage_finished":
            row = self._rows.setdefault(event["transaction"], TransactionRow(event["transaction"]))
            row.add(event)
            if event["stage"] == "validate_run":
                print_json(row.as_json())

    def tick(self) -> None:
        """Programs need no heartbeat."""

    def close(self) -> None:
        """Nothing to close."""


class TableDisplay:
    """Lines per stage and a growing table per transaction; a live line on a terminal, heartbeats elsewhere."""

    def __init__(self, transactions: int) -> None:
        self._console = console()
        self._transactions = transactions
        self._rows: dict[int, TransactionRow] = {}
        self._current = ""
        self._detail = ""
        self._stage_started = time.monotonic()
        self._last_line = time.monotonic()
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=self._console
            )
            self._task = self._live.add_task("starting", total=None)
            self._live.start()

    def _print(self, renderable: Any) -> None:
        self._console.print(renderable, markup=False) if isinstance(renderable, str) else self._console.print(
            renderable
        )
        self._last_line = time.monotonic()

    def event(self, event: Event) -> None:
        """Show one event."""
        kind, stage = event["event"], event.get("stage", "")
        label = f"transaction {event.get('transaction', '?')}/{self._transactions}  {stage}"
        if kind == "stage_started":
            self._current, self._detail, self._stage_started = label, "", time.monotonic()
        elif kind == "progress":
            self._detail = f"{event['phase']} {event['done']}/{event['total']}"
        elif kind == "stage_finished":
            row = self._rows.setdefault(event["transaction"], TransactionRow(event["transaction"]))
            row.add(event)
            self._current, self._detail = "", ""
            note = "verified, reused" if event.get("reused") else str(event.get("status", ""))
            self._print(
                f"{label:<44} {human_seconds(event['seconds']):>8}  "
                f"{human_bytes(event['peak_memory_bytes']):>10}  {note}"
            )
            if stage == "validate_run":
                rows = [self._rows[number].cells() for number in sorted(self._rows)]
                self._print(make_table(TransactionRow.COLUMNS, rows))
        elif kind == "stage_failed":
            self._print(f"{label:<44}   FAILED")
        if self._live is not None:
            self._live.update(self._task, description=f"{self._current}  {self._detail}")

    def tick(self) -> None:
        """Off a terminal, say every now and then what is going on."""
        now = time.monotonic()
        if self._live is None and self._current and now - self._last_line > HEARTBEAT_SECONDS:
            elapsed = human_seconds(now - self._stage_started)
            self._print(f"{self._current:<44} {elapsed:>8}  still running  {self._detail}".rstrip())

    def close(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()

"""`longstraw verify`: re-hash a run and report every fault."""

from dataclasses import asdict
from pathlib import Path

import click

from longstraw_core.artifacts import VerifyReport, open_store, verify_directory, verify_store
from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, human_bytes, print_json
from longstraw_core.spec import IntegrityError, SpecError


@click.command(
    "verify",
    epilog="Examples: longstraw verify runs/recall-seed0   |   longstraw verify file:///data/store --run nightly",
)
@click.argument("target", metavar="WORKDIR|STORE_URI")
@click.option("--run", "run_name", help="Verify only this run of the store.")
@output_option
@reports_errors
def verify_command(target: str, run_name: str | None, output: OutputFormat) -> None:
    """Re-hash a finished run and report everything that is not as it was published.

    WORKDIR is the directory of a finished `longstraw run`; a store URI (file://…) verifies the artifacts alone.
    Exit code 11 when anything was changed, added, removed or replaced.
    """
    if "://" in target:
        report = verify_store(open_store(target), run_name)
    else:
        _check_run_directory(Path(target))
        report = verify_directory(Path(target))
    _show(report, output)
    if not report.ok:
        raise IntegrityError(f"{target}: {len(report.faults)} fault(s); do not use these artifacts")


def _check_run_directory(path: Path) -> None:
    """Refuse a directory that shows no sign of a run: more likely a wrong argument than a damaged run."""
    signs = ("run.json", "store", "complete.sha256-*.json")
    if path.is_dir() and not any(any(path.glob(sign)) for sign in signs):
        raise SpecError(f"{path} is not the work directory of a run; it holds no run.json, store or seal")


def _show(report: VerifyReport, output: OutputFormat) -> None:
    if output == "json":
        for fault in report.faults:
            print_json({"event": "fault", **asdict(fault)})
        print_json(
            {
                "event": "verified",
                "ok": report.ok,
                "faults": len(report.faults),
                "receipts": report.receipts,
                "blobs": report.blobs,
                "bytes": report.bytes,
                "unreferenced": report.unreferenced,
                "unchecked": report.unchecked,
            }
        )
        return
    screen = console()
    for fault in report.faults:
        screen.print(f"{fault.kind:<10} {fault.path}: {fault.message}", markup=False)
    for name in report.unchecked:
        screen.print(f"not checked (out of reach): {name}", markup=False)
    screen.print(
        f"{'ok' if report.ok else 'NOT ok'}: {report.receipts} receipts, {report.blobs} blobs, "
        f"{human_bytes(report.bytes)} re-hashed, {len(report.faults)} faults",
        markup=False,
    )

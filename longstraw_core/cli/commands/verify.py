"""`longstraw verify`: re-hash a run and report every fault."""

import os
from dataclasses import asdict
from pathlib import Path

import click

from longstraw_core.artifacts import VerifyReport, open_store, split_receipt_uri, verify_directory, verify_store
from longstraw_core.artifacts.signing import VERIFY_KEY_VARIABLE
from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, human_bytes, print_json, printable
from longstraw_core.spec import IncompleteRun, IntegrityError, SpecError


@click.command(
    "verify",
    epilog="Examples: longstraw verify runs/recall-seed0   |   longstraw verify s3://team/store --run nightly   |   "
    "longstraw verify s3://team/store/runs/nightly/0001/train/receipt.json --deep",
)
@click.argument("target", metavar="WORKDIR|STORE_URI|RECEIPT_URI")
@click.option("--run", "run_name", help="Verify only this run of the store.")
@click.option(
    "--deep", is_flag=True, help="Of one run: verify also every run that its checkpoints were continued from."
)
@click.option(
    "--verify-key",
    type=click.Path(path_type=Path),
    help=f"PEM file of the public key that must have signed every receipt (default: ${VERIFY_KEY_VARIABLE}).",
)
@click.option(
    "--allow-incomplete",
    is_flag=True,
    help="Exit with 0 also when a run lacks stages, as long as nothing else is wrong.",
)
@output_option
@reports_errors
def verify_command(
    target: str,
    run_name: str | None,
    deep: bool,
    verify_key: Path | None,
    allow_incomplete: bool,
    output: OutputFormat,
) -> None:
    """Re-hash a finished run and report everything that is not as it was published.

    WORKDIR is the directory of a finished `longstraw run`; a store URI (file://… or s3://…) verifies the artifacts
    alone, and the URI of any receipt the whole run that it belongs to. Exit code 11 when anything was changed, added,
    removed or replaced; 13 when nothing was, but a transaction lacks the receipt of a stage: it did not finish, or its
    newest receipts were removed; 75 or 2 when the storage could not be read, which says nothing about the artifacts.
    """
    if verify_key is not None:
        os.environ[VERIFY_KEY_VARIABLE] = str(verify_key)
    if "://" in target:
        uri, place = split_receipt_uri(target)
        store = open_store(uri)
        if place is not None and run_name not in (None, place.run):
            raise SpecError(f"--run {run_name}: {target} is a receipt of run {place.run}; leave --run out")
        if place is not None and not store.exists(place.name):
            raise IntegrityError(
                f"{place.name} is missing from {store.uri}; the stage did not finish, or it was removed"
            )
        report = verify_store(store, place.run if place else run_name, deep=deep)
    else:
        if run_name is not None or deep:
            raise SpecError("--run and --deep are for a store; a work directory is verified whole")
        _check_run_directory(Path(target))
        report = verify_directory(Path(target))
    _show(report, output)
    if any(fault.kind != "incomplete" for fault in report.faults):
        raise IntegrityError(f"{target}: {len(report.faults)} fault(s); do not use these artifacts")
    if not report.complete and not allow_incomplete:
        raise IncompleteRun(f"{target}: {_what_is_missing(report)}; finish the run, or accept this: --allow-incomplete")


def _check_run_directory(path: Path) -> None:
    """Refuse a directory that shows no sign of a run: more likely a wrong argument than a damaged run."""
    signs = ("run.json", "store", "complete.sha256-*.json")
    if path.is_dir() and not any(any(path.glob(sign)) for sign in signs):
        raise SpecError(f"{path} is not the work directory of a run; it holds no run.json, store or seal")


def _what_is_missing(report: VerifyReport) -> str:
    """The first thing that a complete run would have, and how many more there are."""
    if report.incomplete:
        first = report.incomplete[0]
        more = len(report.incomplete) - 1
        return (
            f"run {first.run}, transaction {first.transaction} has no usable receipt of {', '.join(first.missing)}"
            + (f" (and {more} more transactions lack stages)" if more else "")
        )
    if report.receipts == 0:
        return "there is no receipt of any run"
    return "the work directory is not sealed"


def _show(report: VerifyReport, output: OutputFormat) -> None:
    if output == "json":
        for fault in report.faults:
            print_json({"event": "fault", **asdict(fault)})
        print_json(
            {
                "event": "verified",
                "ok": report.ok,
                "complete": report.complete,
                "incomplete": [asdict(transaction) for transaction in report.incomplete],
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
        screen.print(printable(f"{fault.kind:<10} {fault.path}: {fault.message}"), markup=False)
    for lacking in report.incomplete:
        screen.print(
            printable(f"incomplete run {lacking.run}, transaction {lacking.transaction}: {', '.join(lacking.missing)}"),
            markup=False,
        )
    for name in report.unchecked:
        screen.print(printable(f"not checked (out of reach): {name}"), markup=False)
    verdict = f"{'ok' if report.ok else 'NOT ok'}, {'complete' if report.complete else 'INCOMPLETE'}"
    screen.print(
        f"{verdict}: {report.receipts} receipts, {report.blobs} blobs, {human_bytes(report.bytes)} re-hashed, "
        f"{len(report.faults)} faults",
        markup=False,
    )

"""`longstraw gc`: delete the artifacts of old runs."""

import click

from longstraw_core.artifacts import collect_garbage, open_store
from longstraw_core.cli.command import FiniteRange, output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, human_bytes, print_json


@click.command("gc", epilog="Example: longstraw gc --store s3://team/longstraw --keep-runs 10 --dry-run")
@click.option("--store", "uri", required=True, help="Store URI: file://… or s3://bucket/prefix.")
@click.option("--keep-runs", type=click.IntRange(0), required=True, help="How many runs to keep, the newest first.")
@click.option(
    "--grace-hours",
    type=FiniteRange(0),
    default=24.0,
    show_default=True,
    help="Delete nothing younger: a running stage's blobs have no receipt yet.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@output_option
@reports_errors
def gc_command(uri: str, keep_runs: int, grace_hours: float, dry_run: bool, output: OutputFormat) -> None:
    """Delete what no kept run, checkpoint or snapshot reaches.

    Kept are the newest runs, runs younger than the grace period, the checkpoint that every policy points to, every
    checkpoint that those were trained from, and registered snapshots. Nothing is deleted when any of it has a fault.
    """
    report = collect_garbage(open_store(uri), keep_runs=keep_runs, grace_seconds=grace_hours * 3600, dry_run=dry_run)
    if output == "json":
        print_json(
            {
                "event": "garbage",
                "dry_run": dry_run,
                "kept_runs": report.kept_runs,
                "dropped_runs": report.dropped_runs,
                "receipts": report.receipts,
                "blobs": report.blobs,
                "bytes": report.bytes,
                "journals": report.journals,
                "young": report.young,
            }
        )
        return
    screen = console()
    verb = "would delete" if dry_run else "deleted"
    if dry_run:
        for name in (*report.receipts, *report.blobs, *report.journals):
            screen.print(name, markup=False)
    screen.print(
        f"{verb} {len(report.dropped_runs)} runs ({len(report.receipts)} receipts), {len(report.blobs)} blobs, "
        f"{human_bytes(report.bytes)}, and {len(report.journals)} journal objects; kept {len(report.kept_runs)} runs"
        + (f", and {report.young} unreached blobs younger than {grace_hours:g} h" if report.young else ""),
        markup=False,
    )

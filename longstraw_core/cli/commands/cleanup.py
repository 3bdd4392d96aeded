"""`longstraw cleanup`: delete what the multi-pod stages of a run left in a cluster."""

from typing import TYPE_CHECKING

import click

from longstraw_core.artifacts import open_store
from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, make_table, print_json, printable
from longstraw_core.spec import IntegrityError

if TYPE_CHECKING:
    from longstraw_core.cluster.cleanup import CleanupReport


@click.command("cleanup", epilog="Example: longstraw cleanup recall --store s3://team/longstraw --dry-run")
@click.argument("run")
@click.option("--store", "uri", required=True, help="Store URI of the run, where its journals are: s3://bucket/prefix.")
@click.option("--kubeconfig", help="File with access to the cluster (default: KUBECONFIG, or this pod's own account).")
@click.option("--context", help="Context of that file (default: its current one).")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@click.option(
    "--even-running", is_flag=True, help="Also what belongs to a launcher that still lives: this ends its stage."
)
@output_option
@reports_errors
def cleanup_command(
    run: str,
    uri: str,
    kubeconfig: str | None,
    context: str | None,
    dry_run: bool,
    even_running: bool,
    output: OutputFormat,
) -> None:
    """Delete the Jobs and Services that a run's stages created and did not give back.

    Only objects that the ownership journal in the store names are deleted, each by its uid; stages whose launcher
    still lives are left alone. Doing it again changes nothing.
    """
    from longstraw_core.cluster.api import ClusterApi, connect
    from longstraw_core.cluster.cleanup import clean_up

    store = open_store(uri)
    client = connect(kubeconfig=kubeconfig, context=context)
    report = clean_up(
        store, lambda namespace: ClusterApi(client, namespace), run, dry_run=dry_run, even_running=even_running
    )
    if output == "json":
        print_json(
            {
                "event": "cleanup",
                "run": run,
                "dry_run": dry_run,
                "attempts": report.attempts,
                "closed": report.closed,
                "running": report.running,
                "foreign": report.foreign,
                "unreadable": report.unreadable,
                "removed": [
                    {
                        "kind": item.kind,
                        "namespace": item.namespace,
                        "name": item.name,
                        "uid": item.uid,
                        "stage": item.stage,
                        "transaction": item.transaction,
                        "attempt": item.attempt,
                    }
                    for item in report.removed
                ],
            }
        )
    else:
        _print_report(run, report, dry_run)
    if report.unreadable:
        raise IntegrityError("\n".join(report.unreadable))


def _print_report(run: str, report: "CleanupReport", dry_run: bool) -> None:
    screen = console()
    if report.removed:
        rows = [
            (item.kind, f"{item.namespace}/{item.name}", item.stage, item.transaction, item.attempt, item.uid)
            for item in report.removed
        ]
        screen.print(make_table(("kind", "object", "stage", "transaction", "attempt", "uid"), rows))
    for stage in report.running:
        screen.print(f"left alone: {printable(stage)}, its launcher still runs (--even-running ends it)", markup=False)
    for item in report.foreign:
        screen.print(
            f"left alone: {printable(item)}: a journal of {printable(run)} claims it, its labels are not that run's",
            markup=False,
        )
    verb = "would delete" if dry_run else "deleted"
    screen.print(
        f"{verb} {len(report.removed)} objects; {report.closed} of {report.attempts} attempts had nothing left",
        markup=False,
    )

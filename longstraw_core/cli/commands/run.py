"""`longstraw run`: transactions on this machine, from the compiled pipeline."""

from pathlib import Path

import click

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.compile_pipeline import compile_pipeline, spec_parameter
from longstraw_core.cli.dry_run import show_dry_run
from longstraw_core.cli.local_run import WorkDirectory, claim, execute, is_finished, prepare
from longstraw_core.cli.output import OutputFormat
from longstraw_core.cli.run_display import JsonDisplay, TableDisplay
from longstraw_core.cli.run_summary import finish_run
from longstraw_core.cli.spec_file import default_workdir, read_spec, resolve_paths
from longstraw_core.stages.preflight import check_before_start
from longstraw_core.stages.source import source_digest


@click.command(
    "run",
    epilog="Examples: longstraw run examples/recall/transaction.yaml --transactions 6 --workdir runs/recall   |   "
    "longstraw run transaction.yaml --set seed=1 --set objective.gradient=stopgrad --dry-run",
)
@click.argument("spec", type=click.Path(path_type=Path))
@click.option(
    "--transactions", type=click.IntRange(1, 100), help="Chained transactions (default: the specification's)."
)
@click.option(
    "--workdir",
    type=click.Path(path_type=Path),
    help="Directory of this run: artifacts, logs, report (default: runs/<name>-seed<seed>).",
)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Replace one field; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print what would run, read and be written; start nothing.")
@output_option
@reports_errors
def run_command(
    spec: Path,
    transactions: int | None,
    workdir: Path | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    output: OutputFormat,
) -> None:
    """Run the transactions of SPEC on this machine, without a cluster.

    The specification is compiled to the same pipeline that a cluster runs, and KFP's own local runner executes it.
    A run that was stopped or killed continues with the same command: finished stages are verified and reused.
    """
    written = read_spec(spec, overrides)
    work = WorkDirectory((workdir or default_workdir(written)).absolute())
    resolved = resolve_paths(written, spec.parent, store=work.store)
    count = transactions or resolved.schedule.transactions
    check_before_start(resolved)
    parameter = spec_parameter(resolved)
    if dry_run:
        show_dry_run(resolved, work, count, output)
        return
    with claim(work, resolved, source_digest()) as lock:
        if not is_finished(work, resolved, count):
            prepare(work)
            display = JsonDisplay() if output == "json" else TableDisplay(count)
            execute(
                work,
                compile_pipeline(resolved, count),
                {"spec": parameter, "run": resolved.name, "parent_checkpoint": ""},
                lock,
                display,
            )
        finish_run(work, resolved, count, output)

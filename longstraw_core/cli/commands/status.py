"""`longstraw status` and `longstraw cancel`: a run on a cluster."""

import click

from longstraw_core.cli.command import FiniteRange, output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, print_json
from longstraw_core.cli.run_states import follow_run, require_success, run_record, show_run
from longstraw_core.cli.server_options import connect, server_options
from longstraw_core.kubeflow.server import ServerAddress


@click.command("status", epilog="Example: longstraw status RUN --endpoint http://localhost:8080 -f")
@click.argument("run")
@server_options
@click.option("-f", "--follow", is_flag=True, help="Show changes until the end; exit 0 only for SUCCEEDED.")
@click.option("--poll-seconds", type=FiniteRange(0.05), default=5.0, show_default=True, help="Between two looks.")
@output_option
@reports_errors
def status_command(
    run: str,
    address: ServerAddress | None,
    namespace: str | None,
    follow: bool,
    poll_seconds: float,
    output: OutputFormat,
) -> None:
    """Show the state of RUN (an id) and of its stages; exit 3 when it failed or was cancelled."""
    del namespace  # a run's id is enough
    server = connect(address)
    if follow:
        view = follow_run(server, run, output, poll_seconds=poll_seconds, timeout_seconds=None)
    else:
        view = server.run(run)
        show_run(view, server.url(run), output)
    if view.is_finished:
        require_success(view, server.url(run))


@click.command("cancel", epilog="Example: longstraw cancel RUN --endpoint http://localhost:8080 -f")
@click.argument("run")
@server_options
@click.option("-f", "--follow", is_flag=True, help="Wait until the run has ended.")
@click.option("--poll-seconds", type=FiniteRange(0.05), default=5.0, show_default=True, help="Between two looks.")
@output_option
@reports_errors
def cancel_command(
    run: str,
    address: ServerAddress | None,
    namespace: str | None,
    follow: bool,
    poll_seconds: float,
    output: OutputFormat,
) -> None:
    """Ask for the end of RUN (an id). What its stages published stays; a run that has ended is left alone."""
    del namespace
    server = connect(address)
    view = server.run(run)
    if not view.is_finished:
        server.terminate(run)
        if follow:
            view = follow_run(server, run, output, poll_seconds=poll_seconds, timeout_seconds=None)
        else:
            view = server.run(run)
    if output == "json":
        print_json(run_record(view, server.url(run)))
    else:
        click.echo(f"run {run}: {view.state}")

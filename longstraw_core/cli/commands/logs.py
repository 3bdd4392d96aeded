"""`longstraw logs`: what the stages of a run on a cluster print."""

import time
from pathlib import Path
from typing import cast, get_args

import click

from longstraw_core.cli.command import FiniteRange, output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, print_json, printable
from longstraw_core.cli.server_options import connect, server_options
from longstraw_core.kubeflow.kubernetes_access import NotThere, open_kubernetes
from longstraw_core.kubeflow.pod_logs import StagePod, follow_logs, read_log, stage_pods
from longstraw_core.kubeflow.server import ServerAddress
from longstraw_core.spec import SpecError
from longstraw_core.spec.receipts import StageName


@click.command("logs", epilog="Example: longstraw logs RUN -n team --stage train -f --endpoint http://localhost:8080")
@click.argument("run")
@server_options
@click.option("--stage", type=click.Choice(get_args(StageName)), help="Only this stage (default: all).")
@click.option("--tail", type=click.IntRange(0), help="Only the last lines of every pod; not with -f.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended; needs --endpoint.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Default: KUBECONFIG, or ~/.kube/config.")
@click.option("--context", help="Context of the kubeconfig (default: its current one).")
@click.option("--poll-seconds", type=FiniteRange(0.05), default=5.0, show_default=True, help="Between two looks.")
@output_option
@reports_errors
def logs_command(
    run: str,
    address: ServerAddress | None,
    namespace: str | None,
    stage: str | None,
    tail: int | None,
    follow: bool,
    kubeconfig: Path | None,
    context: str | None,
    poll_seconds: float,
    output: OutputFormat,
) -> None:
    """Print the logs of the stages of RUN (an id), the oldest pod first, from the Kubernetes API."""
    if follow and tail is not None:
        raise SpecError("--tail and -f: choose one; -f prints every line from the start")
    server = connect(address) if follow else None
    access = open_kubernetes(kubeconfig, context, namespace)
    chosen = cast("StageName | None", stage)

    def show(pod: StagePod, line: str) -> None:
        if output == "json":
            print_json({"event": "log", "stage": pod.stage, "pod": pod.name, "line": line})
        else:
            click.echo(f"[{pod.stage}] {printable(line)}")

    if server is not None:
        count = follow_logs(
            access,
            run,
            chosen,
            show,
            run_is_finished=lambda: server.run(run).is_finished,
            clock=time.monotonic,
            sleep=time.sleep,
            poll_seconds=poll_seconds,
        )
    else:
        pods = stage_pods(access, run, chosen)
        for pod in pods:
            if not pod.started:
                continue
            try:
                for line in read_log(access, pod, follow=False, tail=tail):
                    show(pod, line)
            except NotThere:
                click.echo(f"{pod.name} was deleted a moment ago; its log is gone", err=True)
        count = len(pods)
    if count == 0:
        where = f" of stage {stage}" if stage else ""
        raise SpecError(
            f"namespace {access.namespace} has no pod{where} of run {run}: it has not started yet, the pods were "
            "deleted, or -n names another namespace"
        )

"""`longstraw submit`: a specification to a run on a cluster, and its end to an exit code."""

import tempfile
from pathlib import Path

import click

from longstraw_core.cli.command import FiniteRange, output_option, reports_errors
from longstraw_core.cli.compile_pipeline import compile_pipeline
from longstraw_core.cli.output import OutputFormat, print_json
from longstraw_core.cli.run_states import follow_run, require_success
from longstraw_core.cli.server_options import connect, server_options
from longstraw_core.cli.spec_file import read_spec
from longstraw_core.kubeflow.lint import load_pipeline
from longstraw_core.kubeflow.server import ServerAddress
from longstraw_core.kubeflow.submission import (
    PIPELINE_ROOT_SCHEMES,
    check_for_cluster,
    check_pipeline,
    run_parameters,
)
from longstraw_core.spec import SpecError, sha256_digest


@click.command(
    "submit",
    epilog="Example: longstraw submit transaction.yaml --endpoint https://kubeflow.example/pipeline "
    "--images images/images.lock.json --wait",
)
@click.argument("spec", type=click.Path(path_type=Path))
@server_options
@click.option(
    "--images",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Image lock, a JSON object name → repository@sha256:… (default: images/images.lock.json, where it exists).",
)
@click.option(
    "--transactions", type=click.IntRange(1, 100), help="Chained transactions (default: the specification's)."
)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Replace one field; may be repeated.")
@click.option(
    "--param",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set one run-time parameter of the pipeline, for instance trainer_memory=512Gi; may be repeated.",
)
@click.option("--pipeline", default="longstraw", show_default=True, help="Name of the pipeline that versions go to.")
@click.option("--experiment", default="longstraw", show_default=True, help="Experiment of the run; created if needed.")
@click.option("--run-name", help="Name that the UI shows (default: the specification's).")
@click.option("--pipeline-root", help="Where KFP keeps its small artifacts, s3://… (default: the installation's).")
@click.option("--service-account", help="Service account of the pods (default: the installation's).")
@click.option("--register-only", is_flag=True, help="Upload the pipeline and start no run.")
@click.option("--wait", is_flag=True, help="Show the stages' states until the end; exit 0 only for SUCCEEDED.")
@click.option("--timeout-minutes", type=FiniteRange(0), help="Longest wait; afterwards exit 75, the run goes on.")
@click.option("--poll-seconds", type=FiniteRange(0.05), default=5.0, show_default=True, help="Between two looks.")
@output_option
@reports_errors
def submit_command(
    spec: Path,
    address: ServerAddress | None,
    namespace: str | None,
    images: Path | None,
    transactions: int | None,
    overrides: tuple[str, ...],
    assignments: tuple[str, ...],
    pipeline: str,
    experiment: str,
    run_name: str | None,
    pipeline_root: str | None,
    service_account: str | None,
    register_only: bool,
    wait: bool,
    timeout_minutes: float | None,
    poll_seconds: float,
    output: OutputFormat,
) -> None:
    """Compile SPEC, upload it where it is not there yet, and start a run.

    The version's name is the digest of the compiled pipeline, so the same specification and images are uploaded once.
    """
    from components.images import image_lock
    from pipelines.planned_placement import check_accelerators, check_spread

    del namespace  # the address has it
    server = connect(address)
    parsed = read_spec(spec, overrides)
    check_for_cluster(parsed)
    check_spread(parsed)
    lock = image_lock(images)
    content = compile_pipeline(parsed, transactions or parsed.schedule.transactions, lock)
    compiled = load_pipeline(content, "the compiled pipeline")
    check_pipeline(compiled, lock)
    parameters = run_parameters(compiled, assignments)
    check_accelerators(parsed, parameters)
    if pipeline_root is not None and not pipeline_root.startswith(PIPELINE_ROOT_SCHEMES):
        raise SpecError(f"--pipeline-root {pipeline_root}: must start with one of {', '.join(PIPELINE_ROOT_SCHEMES)}")
    if register_only and (wait or assignments):
        raise SpecError("--register-only starts no run: it takes neither --wait nor --param")
    version = sha256_digest(content).replace(":", "-")

    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "pipeline.yaml"
        package.write_bytes(content)
        pipeline_id = server.pipeline_id(pipeline)
        version_id, uploaded = server.version_id(pipeline_id, version, package)
    if register_only:
        registered = {"pipeline_id": pipeline_id, "version_id": version_id, "version": version, "uploaded": uploaded}
        if output == "json":
            print_json({"event": "registered", **registered})
        else:
            click.echo(f"version {version} ({'uploaded' if uploaded else 'was there'})")
        return
    run = server.create_run(
        experiment_id=server.experiment_id(experiment),
        name=run_name or parsed.name,
        pipeline_id=pipeline_id,
        version_id=version_id,
        parameters=parameters,
        pipeline_root=pipeline_root,
        service_account=service_account,
    )
    url = server.url(run.run_id)
    if output == "json":
        print_json(
            {
                "event": "submitted",
                "run_id": run.run_id,
                "url": url,
                "pipeline_id": pipeline_id,
                "version_id": version_id,
                "version": version,
                "uploaded": uploaded,
            }
        )
    else:
        click.echo(f"version {version} ({'uploaded' if uploaded else 'was there'})")
        click.echo(f"run {run.run_id}: {url}")
    if not wait:
        return
    timeout = None if timeout_minutes is None else 60 * timeout_minutes
    last = follow_run(server, run.run_id, output, poll_seconds=poll_seconds, timeout_seconds=timeout)
    require_success(last, url)

"""`longstraw lint`: refuse a compiled pipeline that a cluster must not run."""

import sys
from pathlib import Path

import click

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, print_json, printable
from longstraw_core.kubeflow.lint import lint_pipeline, load_pipeline
from longstraw_core.spec import SpecError
from longstraw_core.spec.exit_codes import USAGE


@click.command("lint", epilog="Example: longstraw lint pipeline.yaml --images images/images.lock.json")
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option(
    "--images",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Image lock, a JSON object name → repository@sha256:… (default: images/images.lock.json, where it exists).",
)
@output_option
@reports_errors
def lint_command(pipeline: Path, images: Path | None, output: OutputFormat) -> None:
    """Check the compiled PIPELINE (YAML, of this project or any other); exit 2 when anything is wrong.

    Every executor's image must be pinned by digest and be in the lock, nothing may be installed at run time, no
    argument may exceed what Linux takes, no secret may be written out, and caching must be off. One line per finding.
    """
    from components.images import image_lock

    try:
        content = pipeline.read_bytes()
    except OSError as error:
        raise SpecError(f"{pipeline}: {error.strerror}") from error
    findings = lint_pipeline(load_pipeline(content, str(pipeline)), set(image_lock(images).values()))
    if output == "json":
        for finding in findings:
            print_json({"event": "finding", "task": finding.task, "rule": finding.rule, "message": finding.message})
        print_json({"event": "linted", "path": str(pipeline), "findings": len(findings)})
    else:
        for finding in findings:
            click.echo(printable(str(finding)))
        if not findings:
            click.echo(f"{pipeline}: nothing to object to")
    if findings:
        sys.exit(USAGE)

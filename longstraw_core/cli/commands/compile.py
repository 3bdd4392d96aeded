"""`longstraw compile`: a specification to a KFP pipeline."""

import sys
from pathlib import Path

import click

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.compile_pipeline import compile_pipeline
from longstraw_core.cli.output import OutputFormat, print_json
from longstraw_core.cli.spec_file import read_spec
from longstraw_core.kubeflow.submission import cluster_problems
from longstraw_core.spec import SpecError, sha256_digest
from longstraw_core.stages.whole_file import write_whole


@click.command("compile", epilog="Example: longstraw compile examples/recall/transaction.yaml --out pipeline.yaml")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Where to write the YAML.")
@click.option(
    "--transactions", type=click.IntRange(1, 100), help="Chained transactions (default: the specification's)."
)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Replace one field; may be repeated.")
@click.option(
    "--images",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Image lock, a JSON object name → repository@sha256:… (default: images/images.lock.json, where it exists).",
)
@output_option
@reports_errors
def compile_command(
    spec: Path,
    out: Path,
    transactions: int | None,
    overrides: tuple[str, ...],
    images: Path | None,
    output: OutputFormat,
) -> None:
    """Compile SPEC to a Kubeflow pipeline. The same input gives the same bytes.

    Every task runs in the image that the lock names for its role, by digest; a tag is refused.
    """
    from components.images import image_lock

    parsed = read_spec(spec, overrides)
    count = transactions or parsed.schedule.transactions
    lock = image_lock(images)
    if lock:
        from pipelines.planned_placement import check_spread

        check_spread(parsed)
    if out.exists() and spec.exists() and out.samefile(spec):
        raise SpecError(f"--out: {out} is the specification, which would be lost; name another file")
    content = compile_pipeline(parsed, count, lock)
    if not out.parent.is_dir():
        raise SpecError(f"--out: {out.parent} is not a directory")
    write_whole(out, content)
    pinned = sorted(lock)
    if output == "json":
        print_json(
            {
                "event": "compiled",
                "path": str(out),
                "digest": sha256_digest(content),
                "bytes": len(content),
                "transactions": count,
                "pinned_images": pinned,
            }
        )
    else:
        click.echo(f"{out}: {count} transaction(s), {len(content)} bytes, {sha256_digest(content)}")
    for problem in cluster_problems(parsed) if pinned else ():
        click.echo(f"longstraw: no cluster can run this specification as it is: {problem}", err=True)
    if not pinned:
        click.echo(
            "longstraw: no image is published in images/images.lock.json: this pipeline runs on this machine only "
            "(`longstraw run`)",
            file=sys.stderr,
        )

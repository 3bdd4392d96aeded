"""`longstraw model`: base models."""

from pathlib import Path

import click

from longstraw_core.artifacts import left_out, open_store, read_external_manifest, register_snapshot
from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, human_bytes, human_seconds, print_json, printable
from longstraw_core.stages.snapshot import check_snapshot_files


@click.group("model")
def model_group() -> None:
    """Make base models and pin them."""


@model_group.command("tiny", epilog="Example: longstraw model tiny --out examples/recall/tiny-model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to create; must not exist.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@output_option
@reports_errors
def tiny_command(out: Path, seed: int, output: OutputFormat) -> None:
    """Build and briefly train a small hybrid model (GDN and full attention) for the example.

    A real checkpoint in Hugging Face format, tokenizer included; trained for about 80 seconds of one core.
    """
    from longstraw_core.training.tiny_model import TinyProgress, build_tiny_model

    def show(progress: TinyProgress) -> None:
        if output == "table":
            click.echo(
                f"step {progress.step:>5}/{progress.steps}  loss {progress.loss:.4f}  {human_seconds(progress.seconds)}"
            )
        else:
            print_json(
                {
                    "event": "progress",
                    "step": progress.step,
                    "steps": progress.steps,
                    "loss": progress.loss,
                    "seconds": round(progress.seconds, 3),
                }
            )

    report = build_tiny_model(out, seed=seed, progress=show)
    if output == "table":
        click.echo(
            f"{out}: {report.parameters:,} parameters, final loss {report.loss:.4f}, {human_seconds(report.seconds)}"
        )
    else:
        print_json(
            {
                "event": "model",
                "path": str(out),
                "parameters": report.parameters,
                "steps": report.steps,
                "loss": report.loss,
                "seconds": round(report.seconds, 3),
                "seed": report.seed,
            }
        )


@model_group.command("snapshot", epilog="Example: longstraw model snapshot /models/qwen --store s3://team/longstraw")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--store", "uri", required=True, help="Store URI: file://… or s3://bucket/prefix.")
@output_option
@reports_errors
def snapshot_command(directory: Path, uri: str, output: OutputFormat) -> None:
    """Register the Hugging Face snapshot in DIR: hash every file once and store the manifest, not the files.

    The digest is the snapshot's identity. Pinned as `model.digest` in a specification, a run refuses any other one;
    every stage checks it before it loads weights. Files and directories whose names begin with a dot (.git, .cache, …)
    are no part of it; they are listed.
    """
    check_snapshot_files(directory)
    store = open_store(uri, create=True)
    snapshot = register_snapshot(store, directory)
    manifest = read_external_manifest(store, snapshot)
    hidden = left_out(directory)
    if output == "json":
        print_json(
            {
                "event": "snapshot",
                "path": str(directory),
                "digest": snapshot.digest,
                "files": len(manifest.entries),
                "bytes": manifest.total_bytes,
                "left_out": hidden,
                "descriptor": snapshot.to_json_object(),
            }
        )
        return
    click.echo(f"{directory}: {len(manifest.entries)} files, {human_bytes(manifest.total_bytes)}")
    if hidden:
        click.echo(printable(f"left out, because the name begins with a dot: {', '.join(hidden)}"))
    click.echo(f"model.digest: {snapshot.digest}")

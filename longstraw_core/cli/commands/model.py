"""`longstraw model`: base models."""

from pathlib import Path

import click

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, human_seconds, print_json


@click.group("model")
def model_group() -> None:
    """Make base models."""


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

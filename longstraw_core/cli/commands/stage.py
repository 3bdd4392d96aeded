"""`longstraw stage`: one stage alone, against the artifacts of a run."""

from collections.abc import Callable
from pathlib import Path

import click

from longstraw_core.cli.command import fail, output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, human_bytes, print_json
from longstraw_core.cli.spec_file import default_workdir, read_spec, resolve_paths
from longstraw_core.spec import LongStrawError, SpecError, StageFailed
from longstraw_core.stages.catalogue import CATALOGUE, StageEntry
from longstraw_core.stages.execute import StageRequest, parse_parent_checkpoint, run_stage
from longstraw_core.stages.failure import report_stage_failure


@click.group("stage")
def stage_group() -> None:
    """Run one stage of a transaction alone.

    Its inputs are the receipts that the stages before it left in the store; its outputs go there too, the receipt
    last. A stage that already finished is verified and reused.
    """


def _ranks_option(entry: StageEntry) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`--nproc` for the stages that run on ranks; the others have no such option."""
    if not entry.ranked:
        return lambda function: function
    return click.option(
        "--nproc",
        type=click.IntRange(1, 4096),
        help="Context-parallel ranks on this machine, started by torchrun (default: layout.context_parallel).",
    )


def _stage_command(entry: StageEntry) -> click.Command:
    @click.command(
        entry.name,
        help=f"{entry.purpose}\n\n\b\nReads:  {', '.join((*entry.upstream, *entry.external)) or 'nothing'}\n"
        f"Writes: {', '.join(entry.outputs)}, then the receipt.",
        epilog=f"Example: longstraw stage {entry.name} transaction.yaml --workdir runs/recall-seed0",
    )
    @click.argument("spec", type=click.Path(path_type=Path))
    @click.option(
        "--workdir",
        type=click.Path(path_type=Path),
        help="Work directory of a `longstraw run` whose artifacts are read and written "
        "(default: storage.uri of the specification, else runs/<name>-seed<seed>).",
    )
    @click.option("--store", help="Store URI instead of a work directory: file://… or s3://bucket/prefix.")
    @click.option("--run", "run_name", help="Name of the run (default: name of the specification).")
    @click.option("--transaction", type=click.IntRange(1, 9999), default=1, show_default=True)
    @click.option(
        "--parent-checkpoint",
        metavar="JSON",
        help="Descriptor of the checkpoint manifest to start from (first transaction only; default: a fresh adapter).",
    )
    @click.option(
        "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Replace one field; may be repeated."
    )
    @_ranks_option(entry)
    @output_option
    @reports_errors
    def command(
        spec: Path,
        workdir: Path | None,
        store: str | None,
        run_name: str | None,
        transaction: int,
        parent_checkpoint: str | None,
        overrides: tuple[str, ...],
        output: OutputFormat,
        nproc: int | None = None,
    ) -> None:
        if store is not None:
            if workdir is not None:
                raise SpecError("--store and --workdir: give one of them")
            overrides = (*overrides, f"storage.uri={store}")
        if parent_checkpoint is not None and not parent_checkpoint.strip():
            raise SpecError("--parent-checkpoint: is empty; give the descriptor, or leave the option out")
        written = read_spec(spec, overrides)
        if workdir is None and "storage" not in written.model_fields_set:
            workdir = default_workdir(written)
        parsed = resolve_paths(written, spec.parent, store=None if workdir is None else workdir / "store")
        run = run_name or parsed.name
        try:
            outcome = run_stage(
                StageRequest(
                    stage=entry.name,
                    spec=parsed,
                    run=run,
                    transaction=transaction,
                    parent_checkpoint=parse_parent_checkpoint(parent_checkpoint or ""),
                    context_parallel=nproc,
                )
            )
        except LongStrawError as error:
            report_stage_failure(entry.name, run, transaction, error)
            fail(error, output)
            return
        except Exception as error:
            report_stage_failure(entry.name, run, transaction, error)
            fail(StageFailed(f"{entry.name}: {type(error).__name__}: {error}"), output)
            return
        predicate = outcome.receipt.predicate
        if output == "json":
            print_json(
                {
                    "event": "receipt",
                    "stage": entry.name,
                    "run": run,
                    "transaction": transaction,
                    "status": predicate.status,
                    "reused": outcome.reused,
                    "gradient": predicate.gradient,
                    "receipt": outcome.descriptor.to_json_object(),
                    "outputs": {name: item.to_json_object() for name, item in predicate.outputs.items()},
                    "metrics": predicate.metrics,
                }
            )
            return
        click.echo(f"{entry.name}: {predicate.status}{' (verified, reused)' if outcome.reused else ''}")
        for name, descriptor in sorted(predicate.outputs.items()):
            click.echo(f"  {name:<20} {descriptor.digest}  {human_bytes(descriptor.size)}")
        for name, value in sorted(predicate.metrics.items()):
            click.echo(f"  {name:<44} {value:.6g}")

    return command


for _entry in CATALOGUE.values():
    stage_group.add_command(_stage_command(_entry))

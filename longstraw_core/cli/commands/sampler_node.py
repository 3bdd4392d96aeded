"""`longstraw sampler-node`: one rank of the SGLang server on a machine of its own."""

from pathlib import Path

import click

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, print_json
from longstraw_core.cli.spec_file import read_spec, resolve_paths
from longstraw_core.stages.execute import StageRequest


@click.command(
    "sampler-node", epilog="Example: longstraw sampler-node transaction.yaml --rank 1 --leader sampler-0.sampler"
)
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(1), required=True, help="Number of this node, from 1.")
@click.option("--leader", required=True, help="Host name or address of node 0, which runs the stage `sample`.")
@click.option("--store", help="Store URI (default: storage.uri of the specification).")
@click.option("--run", "run_name", help="Name of the run (default: name of the specification).")
@click.option("--transaction", type=click.IntRange(1, 9999), default=1, show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Replace one field; may be repeated.")
@output_option
@reports_errors
def sampler_node_command(
    spec: Path,
    rank: int,
    leader: str,
    store: str | None,
    run_name: str | None,
    transaction: int,
    overrides: tuple[str, ...],
    output: OutputFormat,
) -> None:
    """Run one rank of the server of stage `sample` on this machine, until rank 0 ends.

    Node 0 runs the stage itself with LONGSTRAW_NODE_RANK=0 and LONGSTRAW_NODE_LEADER set to its own name.
    """
    from longstraw_core.stages.sampler_node import run_sampler_node

    if store is not None:
        overrides = (*overrides, f"storage.uri={store}")
    parsed = resolve_paths(read_spec(spec, overrides), spec.parent)
    request = StageRequest(stage="sample", spec=parsed, run=run_name or parsed.name, transaction=transaction)
    run_sampler_node(request, rank=rank, leader=leader)
    if output == "json":
        print_json({"event": "leader_gone", "run": request.run, "transaction": transaction, "rank": rank})
    else:
        click.echo(f"sampler node {rank}: node 0 has ended")

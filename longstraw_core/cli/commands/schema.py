"""`longstraw schema`: the JSON Schema of a specification or record."""

import json
import sys

import click
from pydantic import BaseModel

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, print_json
from longstraw_core.spec import (
    CheckpointManifest,
    Descriptor,
    Prompt,
    ResponseLogprobs,
    Rollout,
    ScoredGroup,
    SpecError,
    StageReceipt,
    TransactionSpec,
    TreeManifest,
)
from longstraw_core.spec.policy import PolicyPointer

SCHEMAS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        TransactionSpec,
        Prompt,
        Rollout,
        ScoredGroup,
        ResponseLogprobs,
        Descriptor,
        TreeManifest,
        StageReceipt,
        CheckpointManifest,
        PolicyPointer,
    )
}


@click.command("schema", epilog="Example: longstraw schema TransactionSpec > transaction.schema.json")
@click.argument("name", metavar="NAME")
@output_option
@reports_errors
def schema_command(name: str, output: OutputFormat) -> None:
    """Print the JSON Schema of NAME.

    NAME is one of TransactionSpec, Prompt, Rollout, ScoredGroup, ResponseLogprobs, Descriptor, TreeManifest,
    StageReceipt, CheckpointManifest or PolicyPointer.
    """
    if name not in SCHEMAS:
        raise SpecError(f"no schema {name!r}; schemas are {', '.join(SCHEMAS)}")
    schema = SCHEMAS[name].model_json_schema(by_alias=True)
    if output == "json":
        print_json(schema)
    else:
        sys.stdout.write(json.dumps(schema, indent=2) + "\n")

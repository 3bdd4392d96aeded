"""`longstraw gradients`: the finalised gradient of one group, without an optimizer step."""

import tempfile
from pathlib import Path
from typing import Literal, get_args

import click

from longstraw_core.cli.command import output_option, quiet_libraries, reports_errors
from longstraw_core.cli.output import (
    OutputFormat,
    console,
    human_bytes,
    human_seconds,
    make_table,
    print_json,
)
from longstraw_core.spec import SpecError, canonical_json
from longstraw_core.spec.gradient_batch import parse_gradient_batch
from longstraw_core.spec.model import MAX_JSON_INTEGER
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import BaseWeights, LayoutSpec

EXAMPLE = (
    "Example: longstraw gradients --model examples/recall/tiny-model --adapter adapter --batch batch.json "
    "--gradient exact --out gradients.safetensors"
)


@click.command("gradients", epilog=EXAMPLE)
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Hugging Face snapshot directory.")
@click.option("--adapter", type=click.Path(path_type=Path), required=True, help="PEFT adapter directory.")
@click.option("--batch", type=click.Path(path_type=Path), required=True, help="JSON file: one prompt, its responses.")
@click.option("--gradient", type=click.Choice(get_args(GradientMode)), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Safetensors file to write.")
@click.option(
    "--chunk",
    type=click.IntRange(1, MAX_JSON_INTEGER),
    default=2048,
    show_default=True,
    help="Prompt tokens at once.",
)
@click.option("--cp", type=click.IntRange(min=1), default=1, show_default=True, help="Context-parallel ranks.")
@click.option("--ep", type=click.IntRange(min=1), default=1, show_default=True, help="Expert-parallel ranks.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Type of the frozen weights; auto is what the snapshot says. Gradients are float32 always.",
)
@click.option(
    "--base-weights",
    type=click.Choice(get_args(BaseWeights)),
    default="replicated",
    show_default=True,
    help="Frozen layers whole on every rank, or gathered on use.",
)
@click.option("--quantization", type=click.Choice(["nf4"]), help="Keep the frozen layers in four bits (bitsandbytes).")
@click.option("--checkpoint-layers", is_flag=True, help="Recompute each layer in its backward: less memory, more time.")
@output_option
@reports_errors
def gradients_command(
    model: Path,
    adapter: Path,
    batch: Path,
    gradient: GradientMode,
    out: Path,
    chunk: int,
    cp: int,
    ep: int,
    dtype: str,
    base_weights: BaseWeights,
    quantization: Literal["nf4"] | None,
    checkpoint_layers: bool,
    output: OutputFormat,
) -> None:
    """Compute one group's gradient and write it as float32, by PEFT's state-dict names.

    \b
    The batch is JSON:
      {"prompt_token_ids": [...],
       "responses": [{"token_ids": [...], "advantage": 1.0, "old_logprobs": null}],
       "clip": [0.2, 0.2], "aggregation": "sequence_mean"}
    Null old_logprobs mean on-policy. Any fault of an argument or a file is one line and exit code 2.
    """
    if cp % ep:
        raise SpecError(f"--ep {ep}: does not divide --cp {cp}; experts are sharded over the same ranks as tokens")
    try:
        content = batch.read_bytes()
        parse_gradient_batch(content, str(batch))
    except OSError as error:
        raise SpecError(f"{batch}: {error.strerror}") from error
    _admit_out(out, inputs=(model, adapter, batch))
    quiet_libraries()

    from longstraw_core.stages.whole_file import write_whole
    from longstraw_core.training.gradients import GradientsRequest, GradientsSummary, gradients_on_rank
    from longstraw_core.training.launch import run_function

    with tempfile.TemporaryDirectory(prefix="longstraw-") as scratch:
        written = Path(scratch) / "gradients.safetensors"
        request = GradientsRequest(
            model=str(model.absolute()),
            adapter=str(adapter.absolute()),
            batch=content.decode("utf-8"),
            source=str(batch),
            gradient=gradient,
            dtype=dtype,
            quantization=quantization,
            layout=LayoutSpec(
                prompt_chunk_tokens=chunk, checkpoint_layers=checkpoint_layers, base_weights=base_weights
            ),
            out=str(written),
        )
        answer = run_function(
            gradients_on_rank, canonical_json(request), Path(scratch), context_parallel=cp, expert_parallel=ep
        )
        result = GradientsSummary.model_validate_json(answer)
        write_whole(out, written.read_bytes())
    if output == "json":
        print_json(
            {
                "event": "gradients",
                "gradient": gradient,
                "out": str(out),
                "loss": result.loss,
                "gradient_norm": result.gradient_norm,
                "logprobs": [list(values) for values in result.logprobs],
                "peak_memory_bytes": result.peak_memory_bytes,
                "seconds": {phase.name: round(phase.seconds, 6) for phase in result.phases},
            }
        )
        return
    click.echo(f"{out}: {result.tensors} tensors, gradient {gradient}")
    click.echo(
        f"loss {result.loss:.6g}, gradient norm {result.gradient_norm:.6g}, "
        f"peak memory {human_bytes(result.peak_memory_bytes)}"
    )
    console().print(
        make_table(
            ("response", "tokens", "mean log-prob"),
            [(index, len(values), f"{sum(values) / len(values):.4f}") for index, values in enumerate(result.logprobs)],
        )
    )
    click.echo("  ".join(f"{phase.name} {human_seconds(phase.seconds)}" for phase in result.phases))


def _admit_out(out: Path, *, inputs: tuple[Path, ...]) -> None:
    """Refuse a place that is no file of its own: it would be replaced, be it an input or a device such as /dev/null."""
    if out.is_dir():
        raise SpecError(f"--out {out}: is a directory; name a file")
    if out.exists() and (out.is_symlink() or not out.is_file()):
        raise SpecError(f"--out {out}: is not a regular file, and would be replaced by one; name another file")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise SpecError(f"--out {out}: {above} is not a directory")
    for path in inputs:
        if out.resolve() == path.resolve() or path.resolve() in out.resolve().parents:
            raise SpecError(f"--out {out}: belongs to the input {path}; name a file outside of it")

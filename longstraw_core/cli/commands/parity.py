"""`longstraw parity`: the engine against conventional full-sequence training, on a random model, as a gate."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import get_args

import click

from longstraw_core.cli.command import output_option, quiet_libraries, reports_errors
from longstraw_core.cli.output import OutputFormat, console, make_table, print_json
from longstraw_core.spec import NumericError, SpecError
from longstraw_core.spec.model import MAX_JSON_INTEGER
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import BaseWeights, Family, TargetPreset

EXAMPLE = "Example: longstraw parity --family qwen3_5_text --gradient exact --prompt 127 --layers 4 --chunk 50"


@click.command("parity", epilog=EXAMPLE)
@click.option("--family", type=click.Choice(get_args(Family)), required=True)
@click.option("--gradient", type=click.Choice(get_args(GradientMode)), required=True)
@click.option("--prompt", type=click.IntRange(min=1), default=512, show_default=True, help="Prompt tokens.")
@click.option(
    "--responses", default="64,1,33,2", show_default=True, metavar="N,N,…", help="Tokens of each response, repeated."
)
@click.option("--group", type=click.IntRange(min=1), help="Responses in the group (default: as many as --responses).")
@click.option(
    "--chunk", type=click.IntRange(1, MAX_JSON_INTEGER), default=100, show_default=True, help="Prompt tokens at once."
)
@click.option(
    "--page", type=click.IntRange(1, 1 << 20), default=48, show_default=True, help="Tokens per resident page."
)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--targets", type=click.Choice(get_args(TargetPreset)), default="all", show_default=True)
@click.option("--checkpoint-layers", is_flag=True, help="Recompute each layer in its backward.")
@click.option("--cp", type=click.IntRange(min=1), default=1, show_default=True, help="Context-parallel ranks.")
@click.option("--ep", type=click.IntRange(min=1), default=1, show_default=True, help="Expert-parallel ranks.")
@click.option(
    "--base-weights",
    type=click.Choice(get_args(BaseWeights)),
    default="replicated",
    show_default=True,
    help="Frozen layers whole on every rank, or gathered on use.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@output_option
@reports_errors
def parity_command(
    family: Family,
    gradient: GradientMode,
    prompt: int,
    responses: str,
    group: int | None,
    chunk: int,
    page: int,
    layers: int,
    seed: int,
    dtype: str,
    targets: TargetPreset,
    checkpoint_layers: bool,
    cp: int,
    ep: int,
    base_weights: BaseWeights,
    device: str,
    output: OutputFormat,
) -> None:
    """Compare log-probabilities and gradients with transformers + PEFT on full sequences; exit 12 out of tolerance.

    The reference of `stopgrad` is the full sequence with a detached prompt state, that of `response_adapter` the full
    sequence with LoRA masked on the prompt. The gate is the worst single parameter.
    """
    lengths = _lengths(responses, group)
    if cp % ep:
        raise SpecError(f"--ep {ep}: does not divide --cp {cp}; experts are sharded over the same ranks as tokens")
    quiet_libraries()

    from longstraw_core.training.launch import run_function
    from longstraw_core.training.parity import ParityCase, parity_on_rank, read_report

    case = ParityCase(
        family=family,
        gradient=gradient,
        prompt_tokens=prompt,
        response_tokens=lengths,
        chunk_tokens=chunk,
        page_tokens=page,
        layers=layers,
        seed=seed,
        dtype=dtype,
        checkpoint_layers=checkpoint_layers,
        device=device,
        targets=targets,
        context_parallel=cp,
        expert_parallel=ep,
        base_weights=base_weights,
    )
    request = json.dumps(dataclasses.asdict(case)).encode()
    with tempfile.TemporaryDirectory(prefix="longstraw-") as scratch:
        answer = run_function(
            parity_on_rank, request, Path(scratch), context_parallel=cp, expert_parallel=ep, device=device
        )
    report = read_report(answer)
    if output == "json":
        print_json(
            {
                "event": "parity",
                "family": family,
                "gradient": gradient,
                "dtype": dtype,
                "targets": targets,
                "prompt": prompt,
                "responses": list(lengths),
                "chunk": chunk,
                "seed": seed,
                "context_parallel": cp,
                "expert_parallel": ep,
                "base_weights": base_weights,
                "passed": report.passed,
                "cosine": report.whole.cosine,
                "relative_l2": _finite(report.whole.relative_l2),
                "worst": {"name": report.worst.name, "relative_l2": _finite(report.worst.relative_l2)},
                "kinds": {
                    kind.name: {"cosine": kind.cosine, "relative_l2": _finite(kind.relative_l2)}
                    for kind in report.kinds
                },
                "checks": [
                    {
                        "name": check.name,
                        "value": _finite(check.value),
                        "tolerance": check.tolerance,
                        "passed": check.passed,
                    }
                    for check in report.checks
                ],
            }
        )
    else:
        rows = [
            (item.name, item.tensors, f"{item.cosine:.9f}", f"{item.relative_l2:.2e}")
            for item in (*report.kinds, report.whole, report.worst)
        ]
        console().print(make_table(("gradient of", "tensors", "cosine", "relative L2"), rows))
        checks = [
            (check.name, f"{check.value:.2e}", f"{check.tolerance:.2e}", "ok" if check.passed else "OUT OF TOLERANCE")
            for check in report.checks
        ]
        console().print(make_table(("check", "value", "tolerance", ""), checks))
    for check in report.checks:
        if not check.passed:
            raise NumericError(
                f"parity of {family} {gradient}: {check.name} is {check.value:.2e}, tolerance {check.tolerance:.2e}; "
                f"worst parameter {report.worst.name}"
            )


def _finite(value: float) -> float | None:
    """JSON has no infinity: null stands for an error that has no number."""
    return value if value - value == 0.0 else None


def _lengths(responses: str, group: int | None) -> tuple[int, ...]:
    try:
        given = [int(text) for text in responses.split(",")]
    except ValueError:
        given = []
    if not given or min(given) < 1:
        raise SpecError(f"--responses {responses}: must be positive lengths separated by commas, such as 64,1,33")
    count = len(given) if group is None else group
    return tuple(given[index % len(given)] for index in range(count))

"""`longstraw plan`: what a specification needs, before anything is reserved."""

import json
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from longstraw_core.cli.command import output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, human_bytes, human_seconds, make_table, print_json
from longstraw_core.cli.planned_pods import placement_record, plan_pods, print_placements
from longstraw_core.cli.spec_file import read_spec
from longstraw_core.planning.architecture import Architecture, read_architecture
from longstraw_core.planning.memory import Ranks
from longstraw_core.planning.sizing import DeviceFigures, Plan, make_plan, seconds
from longstraw_core.spec import SpecError
from longstraw_core.spec.parse import describe_validation_errors


@click.command(
    "plan",
    epilog="Example: longstraw plan examples/plans/qwen3.6-27b.yaml --context-parallel 8 --prompt-tokens 2097152 "
    "--device examples/plans/device-96gb.json",
)
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Replace one field; may be repeated.")
@click.option("--context-parallel", type=click.IntRange(1), help="Ranks that share the tokens (default: the layout's).")
@click.option("--expert-parallel", type=click.IntRange(1), help="Ranks that share the experts (default: the layout's).")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Length (default: data.max_prompt_tokens or positions).")
@click.option("--device", type=click.Path(path_type=Path), help="JSON file with an accelerator's figures.")
@click.option("--memory-gb", type=float, help="Memory of one accelerator, 10^9 bytes; overrides the file.")
@click.option("--reserved-gb", type=float, help="Of it kept free for driver, buffers and fragmentation.")
@click.option("--teraflops", type=float, help="Peak of one accelerator in the model's data type.")
@click.option("--utilisation", type=float, help="Share of that peak which is reached.")
@click.option("--link-gb-per-second", type=float, help="What one accelerator sends to the others.")
@click.option("--run", "run_name", help="Name of the run, for the names of pods (default: the specification's).")
@click.option("--transaction", type=click.IntRange(1, 9999), default=1, show_default=True)
@click.option("--namespace", "-n", default="kubeflow", show_default=True, help="Where stages of several pods run.")
@click.option(
    "--images",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Image lock, as for `compile`; only stages of several pods need it.",
)
@output_option
@reports_errors
def plan_command(
    spec: Path,
    overrides: tuple[str, ...],
    context_parallel: int | None,
    expert_parallel: int | None,
    prompt_tokens: int | None,
    device: Path | None,
    run_name: str | None,
    transaction: int,
    namespace: str,
    images: Path | None,
    output: OutputFormat,
    **figures: float | None,
) -> None:
    """Print what SPEC needs per rank, whether a prompt fits, an estimate of the time of one prompt's group, and the
    placement of stages of several pods.

    Only the snapshot's config.json is read. Memory is exact for weights, adapter and state; what autograd keeps is
    counted from the engine's reference path. Times come from the figures you give, without overlap. Names and numbers
    of pods are those that the stage's launcher computes; nothing is created.
    """
    parsed = read_spec(spec, overrides)
    architecture = _architecture((spec.parent / parsed.model.snapshot) / "config.json", parsed.model.family)
    ranks = Ranks(context_parallel or parsed.layout.context_parallel, expert_parallel or parsed.layout.expert_parallel)
    tokens = prompt_tokens or parsed.data.max_prompt_tokens or architecture.positions
    placed = parsed.model_copy(
        update={
            "layout": parsed.layout.model_copy(
                update={"context_parallel": ranks.context, "expert_parallel": ranks.expert}
            )
        }
    )
    pods = plan_pods(
        placed,
        run=parsed.name if run_name is None else run_name,
        transaction=transaction,
        namespace=namespace,
        images=images,
    )
    known = _device(device, {name: value for name, value in figures.items() if value is not None})
    plan = make_plan(architecture, parsed, ranks, tokens, known)
    record = plan_record(plan, parsed.objective.gradient, known)
    if output == "json":
        print_json(record | {"placements": [placement_record(pod) for pod in pods]})
    else:
        _print_table(record)
        print_placements(pods)


def plan_record(plan: Plan, gradient: str, device: DeviceFigures | None) -> dict[str, Any]:
    """Return the plan as one JSON object; bytes are per rank unless the name says otherwise."""
    memory, work = plan.memory, plan.work
    times = None if device is None else seconds(work, plan.ranks, device)
    return {
        "event": "plan",
        "family": plan.architecture.family,
        "gradient": gradient,
        "layers": len(plan.architecture.layers),
        "parameters": plan.architecture.parameters,
        "context_parallel": plan.ranks.context,
        "expert_parallel": plan.ranks.expert,
        "prompt_tokens": plan.prompt_tokens,
        "weights_bytes": round(memory.weights),
        "adapter_parameters": plan.adapter_parameters,
        "adapter_and_optimizer_bytes": round(memory.adapter),
        "state_bytes": round(memory.state),
        "state_on_host": memory.state_on_host,
        "state_bytes_per_token_all_ranks": round(plan.state_bytes_per_token, 1),
        "state_bytes_per_token": round(plan.state_bytes_per_token / plan.ranks.context, 1),
        "activation_capture_bytes": round(plan.activations.capture),
        "activation_replay_bytes": round(plan.activations.replay),
        "activation_sweep_bytes": round(plan.activations.sweep),
        "device_bytes": round(memory.device),
        "available_bytes": None if device is None else round((device.memory_gb - device.reserved_gb) * 1e9),
        "fits": plan.fits,
        "longest_prompt_tokens": plan.longest_prompt_tokens,
        "capture_operations": work.capture,
        "replay_operations": work.replay,
        "sweep_operations": work.sweep,
        "capture_traffic_bytes": round(work.capture_traffic),
        "replay_traffic_bytes": round(work.replay_traffic),
        "sweep_traffic_bytes": round(work.sweep_traffic),
        "compute_seconds": None if times is None else round(times[0], 1),
        "exchange_seconds": None if times is None else round(times[1], 1),
    }


def _print_table(record: dict[str, Any]) -> None:
    def shown(name: str) -> str:
        value = record[name]
        if value is None:
            return "- (give --device)"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if "bytes_per_token" in name:
            return f"{value:,} B"
        if name.endswith("_bytes"):
            return human_bytes(value)
        if name.endswith("_seconds"):
            return human_seconds(value)
        if name.endswith("_operations"):
            return f"{value:.3g}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    rows = [(name.replace("_", " "), shown(name)) for name in record if name != "event"]
    console().print(make_table(("per rank", "value"), rows, "Plan of one prompt's group"))


def _architecture(path: Path, family: str) -> Architecture:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"model.snapshot: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"{path}: must be one JSON object")
    architecture = read_architecture(config, str(path))
    if architecture.family != family:
        raise SpecError(f"model.family is {family}, {path} describes {architecture.family}")
    return architecture


def _device(path: Path | None, flags: dict[str, float]) -> DeviceFigures | None:
    if path is None and not flags:
        return None
    fields: Any = {}
    if path is not None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(f"--device: {path}: cannot be read: {error}") from error
    fields = {**fields, **flags} if isinstance(fields, dict) else fields
    source = str(path) if path else "device figures"
    try:
        return DeviceFigures.model_validate(fields)
    except ValidationError as error:
        raise SpecError("\n".join(describe_validation_errors(error, DeviceFigures, source, fields))) from error

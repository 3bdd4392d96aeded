"""`longstraw run --dry-run`: the resolved specification, the stages with what they read and write, the state's size."""

from pathlib import Path

from longstraw_core.cli.local_run import WorkDirectory
from longstraw_core.cli.output import OutputFormat, console, human_bytes, make_table, print_json
from longstraw_core.rewards.prompt_tokens import prompt_token_limit, read_model_limits
from longstraw_core.spec import TransactionSpec
from longstraw_core.stages.catalogue import CATALOGUE


def show_dry_run(spec: TransactionSpec, work: WorkDirectory, transactions: int, output: OutputFormat) -> None:
    """Print what `longstraw run` would do with this specification; nothing is written."""
    from longstraw_core.training.state_size import estimate_state_bytes

    snapshot = Path(spec.model.snapshot)
    limits = read_model_limits(snapshot, spec.model.rope_scaling)
    longest = prompt_token_limit(spec.data, limits, spec.sampling.max_response_tokens)
    state = estimate_state_bytes(snapshot, spec, longest)
    per_token = (state.total - estimate_state_bytes(snapshot, spec, 1).total) / max(longest - 1, 1)
    stages = [
        {
            "stage": entry.name,
            "image": entry.image,
            "reads": [*(f"receipt of {upstream}" for upstream in entry.upstream), *entry.external],
            "writes": [*entry.outputs, "receipt"],
        }
        for entry in CATALOGUE.values()
    ]
    if output == "json":
        print_json({"event": "spec", "spec": spec.to_json_object()})
        for stage in stages:
            print_json({"event": "stage", **stage})
        print_json(
            {
                "event": "plan",
                "workdir": str(work.path),
                "transactions": transactions,
                "gradient": spec.objective.gradient,
                "longest_prompt_tokens": longest,
                "state_bytes": state.total,
                "state_bytes_per_prompt_token": round(per_token, 1),
            }
        )
        return
    screen = console()
    fields = [(path, value) for path, value in _flat(spec.to_json_object())]
    screen.print(make_table(("field", "value"), fields, "Specification, resolved"))
    screen.print()
    rows = [
        (stage["stage"], stage["image"], ", ".join(stage["reads"]) or "-", ", ".join(stage["writes"]))
        for stage in stages
    ]
    screen.print(make_table(("stage", "image", "reads", "writes"), rows, f"Stages, {transactions} time(s)"))
    screen.print()
    screen.print(
        f"Resident state, gradient mode {spec.objective.gradient}: {human_bytes(per_token)} per prompt token, "
        f"{human_bytes(state.total)} for the longest prompt accepted ({longest} tokens)",
        markup=False,
    )
    screen.print(f"Everything would be written to {work.path}", markup=False)


def _flat(value: object, path: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in _flat(inner, f"{path}.{key}" if path else str(key))]
    return [(path, "-" if value is None else value)]

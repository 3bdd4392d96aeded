"""The end of `longstraw run`: the report in reach, the directory sealed, a summary of where things are."""

import json
import sys
from pathlib import Path

from longstraw_core.artifacts import find_receipt, open_store, read_receipt, seal_directory
from longstraw_core.cli.local_run import WorkDirectory
from longstraw_core.cli.output import OutputFormat, console, print_json
from longstraw_core.spec import StageFailed, StageReceipt, TransactionSpec
from longstraw_core.spec.receipts import StageName
from longstraw_core.stages.trainer_history import read_metric_history
from longstraw_core.stages.whole_file import write_whole


def finish_run(work: WorkDirectory, spec: TransactionSpec, transactions: int, output: OutputFormat) -> None:
    """Copy the last report beside the store, seal the directory and print the closing summary."""
    store = open_store(work.store.resolve().as_uri())

    def receipt(stage: StageName) -> StageReceipt:
        descriptor = find_receipt(store, spec.name, transactions, stage)
        if descriptor is None:
            raise StageFailed(
                f"{work.path}: the pipeline ended, but transaction {transactions} has no receipt of {stage}; "
                f"see {work.log}"
            )
        return read_receipt(store, descriptor)

    validated = receipt("validate_run").predicate
    checkpoint = receipt("manifest_checkpoint").predicate.outputs["checkpoint_manifest"]
    evidence = json.loads(store.get_bytes(validated.outputs["evidence"]))
    history = read_metric_history(store, receipt("train").predicate.outputs["checkpoint"])
    if not any(work.path.glob("complete.sha256-*.json")):
        write_whole(work.report, store.get_bytes(validated.outputs["report"]))
        seal_directory(work.path)
    rewards = [metrics["reward"] for metrics in history]
    summary = {
        "event": "summary",
        "workdir": str(work.path),
        "run": spec.name,
        "transactions": transactions,
        "gradient": spec.objective.gradient,
        "seed": spec.seed,
        "rewards": rewards,
        "report": str(work.report),
        "checkpoint": checkpoint.to_json_object(),
        "evidence": [level["level"] for level in evidence["levels"] if level["proven"]],
        "not_proven": [level["level"] for level in evidence["levels"] if not level["proven"]],
    }
    if output == "json":
        print_json(summary)
        return
    screen = console()
    lines = [
        "",
        f"{transactions} transaction(s) done, gradient mode {spec.objective.gradient}, seed {spec.seed}.",
        "mean reward   " + "  ".join(f"{reward:+.3f}" for reward in rewards),
        f"report        {_shown(work.report)}",
        f"checkpoint    {checkpoint.digest}",
        f"              {_shown(work.store / checkpoint.uri)}",
        f"proven        in transaction {transactions}: {'; '.join(summary['evidence'])}",
        f"not proven    in transaction {transactions}: {'; '.join(summary['not_proven']) or '-'}",
        f"check it      {_shown(Path(sys.argv[0]))} verify {_shown(work.path)}",
    ]
    for line in lines:
        screen.print(line, markup=False)


def _shown(path: Path) -> str:
    """A path as a person would type it from here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

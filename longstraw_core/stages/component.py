"""What the KFP shims call: KFP's parameters and artifacts in, one stage run, KFP's artifacts out."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longstraw_core.cluster.termination import Terminated
from longstraw_core.spec import IntegrityError, canonical_json
from longstraw_core.spec.exit_codes import TERMINATED
from longstraw_core.spec.receipts import StageName
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.execute import (
    StageOutcome,
    StageRequest,
    parse_parent_checkpoint,
    run_stage,
    spec_from_parameter,
)
from longstraw_core.stages.failure import report_stage_failure
from longstraw_core.stages.source import check_image_role
from longstraw_core.stages.summary import summarise
from longstraw_core.stages.whole_file import write_whole

RECEIPT_SCHEMA = "longstraw.receipt/1"


def run_component(stage: str, arguments: Mapping[str, Any]) -> str:
    """Run `stage` with the arguments of its KFP component and fill the component's output artifacts.

    Args:
        stage: Name of the stage.
        arguments: The component function's `locals()`: `spec` (JSON string), `run`, `transaction`, for some stages
            `parent_checkpoint` (JSON string), one `<upstream>_receipt` artifact per upstream stage, and the output
            artifacts `receipt`, `summary`, `metrics` and, for some stages, `report`.

    Returns:
        The descriptor of the stage's first output as a JSON string.

    Exits the process with the documented code when the stage fails.
    """
    run, transaction = str(arguments["run"]), int(arguments["transaction"])
    try:
        entry = stage_entry(stage)
        check_image_role(stage, entry.image)
        request = StageRequest(
            stage=stage,
            spec=spec_from_parameter(arguments["spec"]),
            run=run,
            transaction=transaction,
            parent_checkpoint=parse_parent_checkpoint(arguments.get("parent_checkpoint", "")),
            expected_receipts={
                upstream: _receipt_digest(upstream, arguments[f"{upstream}_receipt"]) for upstream in entry.upstream
            },
        )
        outcome = _in_pods_or_here(request, arguments)
        _fill_outputs(outcome, arguments, html=entry.html_report)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, Terminated):  # nothing failed: this pod is being ended, and its pods are deleted
            sys.exit(TERMINATED)
        sys.exit(report_stage_failure(stage, run, transaction, error))
    return canonical_json(outcome.receipt.predicate.outputs[entry.outputs[0]]).decode("utf-8")


def _in_pods_or_here(request: StageRequest, arguments: Mapping[str, Any]) -> StageOutcome:
    if "placement" not in arguments:
        return run_stage(request)
    from longstraw_core.stages.launcher import launch_settings, launch_stage, launcher_of_this_pod

    settings = launch_settings(arguments)
    if settings is None:
        return run_stage(request)
    return launch_stage(
        request,
        image=settings.image,
        placement=settings.placement,
        pod=settings.pod,
        accelerators=settings.accelerators,
        launcher=launcher_of_this_pod(),
    )


def _receipt_digest(upstream: StageName, artifact: Any) -> str:
    digest = "sha256:" + hashlib.sha256(Path(artifact.path).read_bytes()).hexdigest()
    stated = artifact.metadata.get("sha256")
    if stated != digest:
        raise IntegrityError(f"receipt of {upstream} at {artifact.uri}: expected {stated}, observed {digest}")
    return digest


def _fill_outputs(outcome: StageOutcome, arguments: Mapping[str, Any], *, html: bool) -> None:
    predicate = outcome.receipt.predicate
    receipt = arguments["receipt"]
    write_whole(Path(receipt.path), canonical_json(outcome.receipt))
    # Flat strings only: KFP turns numbers into floats and fails on None.
    receipt.metadata["schema"] = RECEIPT_SCHEMA
    receipt.metadata["sha256"] = outcome.descriptor.digest
    receipt.metadata["store_uri"] = outcome.descriptor.uri
    write_whole(Path(arguments["summary"].path), summarise(outcome.receipt).encode("utf-8"))
    for name, value in sorted(predicate.metrics.items()):
        arguments["metrics"].log_metric(name, value)
    write_whole(Path(arguments["metrics"].path), canonical_json(predicate.metrics))
    if html:
        write_whole(Path(arguments["report"].path), outcome.store.get_bytes(predicate.outputs["report"]))

"""Child process of `longstraw run`: executes a compiled pipeline with KFP's own SubprocessRunner.

Two things of the compiled pipeline are a pod's matter and left out here: the environment that compilation sets
(directories of the pod, the identity of its image) and retries, which would only delay a failure's message.
Ends together with its parent: standard input is a pipe whose end means that the parent is gone.
"""

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import yaml


def without_pod_settings(pipeline: str) -> str:
    """Return the pipeline's YAML without the executors' environment and the tasks' retries."""
    documents: list[dict[str, Any]] = list(yaml.load_all(pipeline, Loader=yaml.CSafeLoader))
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        executor["container"].pop("env", None)
    for component in (documents[0]["root"], *documents[0]["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            task.pop("retryPolicy", None)
    return yaml.safe_dump_all(documents, sort_keys=True)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    """Run `PIPELINE.yaml` with the arguments in `ARGUMENTS.json`; artifacts go below `PIPELINE_ROOT`."""
    pipeline, arguments, pipeline_root = (Path(argument) for argument in sys.argv[1:4])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", message=".*may not have a Python.*")
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    from kfp import components, local

    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(pipeline_root))
    component = components.load_component_from_text(without_pod_settings(pipeline.read_text(encoding="utf-8")))
    try:
        component(**json.loads(arguments.read_text(encoding="utf-8")))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

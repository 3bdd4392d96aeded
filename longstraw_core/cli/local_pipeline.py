"""Child process of `longstraw run`: executes a compiled pipeline with KFP's own SubprocessRunner.

Ends together with its parent: standard input is a pipe whose end means that the parent is gone.
"""

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path


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
    component = components.load_component_from_file(str(pipeline))
    try:
        component(**json.loads(arguments.read_text(encoding="utf-8")))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a compiled pipeline with KFP's DockerRunner: `python -m tests.e2e.containers.docker_pipeline SETTINGS.json`.

The pods' `/scratch` and the store's credentials, which a cluster gives by volume and secret, are bind mounts here: the
runner replaces the environment of a task that sets variables of its own.
"""

import json
import os
import sys
import warnings
from pathlib import Path


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # what this process makes for a container is written by the container's user
    os.umask(0)
    warnings.filterwarnings("ignore")
    from docker.types import Mount
    from kfp import components, local

    mounts = [
        Mount(mount["target"], mount["source"], type="bind", read_only=mount["read_only"])
        for mount in settings["mounts"]
    ]
    runner = local.DockerRunner(
        network_mode="host",
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        tmpfs={"/tmp": "mode=1777"},  # noqa: S108
        mounts=mounts,
    )
    local.init(runner, pipeline_root=settings["root"])
    pipeline = components.load_component_from_file(settings["pipeline"])
    try:
        pipeline(**settings["arguments"])
    except Exception as error:  # the engine's errors have no class in common with KFP's
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A launcher in a process of its own, to be killed: arguments are a JSON file; lines go to standard output."""

import json
import sys
from pathlib import Path

from kubernetes import client

from longstraw_core.artifacts import open_store
from longstraw_core.cluster.api import ClusterApi, make_client
from longstraw_core.cluster.journal import LauncherPod
from longstraw_core.cluster.launch import launch
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.cluster.termination import Terminated
from longstraw_core.spec import LongStrawError
from longstraw_core.spec.exit_codes import TERMINATED, exit_code
from tests.cluster.conftest import SHORT_OUTAGE


def main() -> int:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    configuration = client.Configuration()
    configuration.host = arguments["url"]
    configuration.api_key = {"authorization": f"Bearer {arguments['token']}"}
    configuration.ssl_ca_cert = arguments["certificate"]
    plan = PlacementPlan.model_validate_json(arguments["plan"])
    try:
        launch(
            plan,
            store=open_store(arguments["store"]),
            api=ClusterApi(make_client(configuration), plan.namespace, SHORT_OUTAGE.patience),
            launcher=LauncherPod.model_validate(arguments["launcher"]),
            say=lambda line: print(line, flush=True),
            times=SHORT_OUTAGE,
        )
    except Terminated:
        return TERMINATED
    except LongStrawError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

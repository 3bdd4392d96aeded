"""The options with which every command finds KFP's API server; a token is never an argument, which `ps` would show."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from longstraw_core.kubeflow.server import KubeflowServer, ServerAddress
from longstraw_core.spec import SpecError

TOKEN_VARIABLE = "KFP_EXISTING_TOKEN"  # noqa: S105


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add `--endpoint`, `-n/--namespace`, `--token-file` and `--ca-file`; the function gets `address`, `namespace`."""

    @click.option("--endpoint", envvar="KFP_ENDPOINT", help="KFP's address, as in the browser (or KFP_ENDPOINT).")
    @click.option(
        "-n",
        "--namespace",
        envvar="KFP_NAMESPACE",
        help="Your namespace: of the runs in a multi-user installation, of the pods for logs (or KFP_NAMESPACE).",
    )
    @click.option(
        "--token-file",
        envvar="KF_PIPELINES_SA_TOKEN_PATH",
        type=click.Path(path_type=Path),
        help=f"File with a bearer token; without one, {TOKEN_VARIABLE} is used where it is set.",
    )
    @click.option("--ca-file", type=click.Path(path_type=Path), help="Authority that signed the server's certificate.")
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        endpoint, namespace = kwargs.pop("endpoint"), kwargs.pop("namespace")
        token_file, authority = kwargs.pop("token_file"), kwargs.pop("ca_file")
        address = None
        if endpoint:
            token = None if token_file else os.environ.get(TOKEN_VARIABLE)
            address = ServerAddress(endpoint, namespace, token, token_file, authority)
        function(*args, address=address, namespace=namespace, **kwargs)

    return wrapped


def connect(address: ServerAddress | None) -> KubeflowServer:
    """Return the server that the options name.

    Raises:
        SpecError: they name none.
    """
    if address is None:
        raise SpecError("--endpoint (or KFP_ENDPOINT) is missing: KFP's address, for instance http://localhost:8080")
    return KubeflowServer(address)

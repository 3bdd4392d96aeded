"""Running the command-line tools that the cluster is made with: argument lists only, one-line errors."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping

TOOLS = {
    "kind": "https://kind.sigs.k8s.io, 0.30 or newer",
    "kubectl": "a version that the cluster's supports",
    "docker": "an engine that runs; kind's nodes are its containers",
    "git": "it fetches the manifests",
    "buildah": "it builds the images",
    "skopeo": "it asks registries for digests",
    "debootstrap": "it makes the base image",
}


class SetupError(RuntimeError):
    """The cluster cannot be made: one line with what is wrong and what to do."""


def missing_tools(names: Iterable[str] = TOOLS) -> str | None:
    """Return one line that names every tool that is not on PATH (or in /usr/sbin), None when all are there."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if not missing:
        return None
    return "missing: " + "; ".join(f"{name} ({TOOLS[name]})" for name in missing)


def run(*command: str, given: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it printed, without the last newline.

    Args:
        command: Program and arguments.
        given: Its standard input; default: none.
        environment: Variables besides this process' own.

    Raises:
        SetupError: the program is missing or failed; its last line of error output is in the message.
    """
    try:
        done = subprocess.run(
            command,
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is missing: {TOOLS.get(command[0], 'install it')}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise SetupError(f"`{' '.join(command[:4])} …` exited with {done.returncode}: {said}")
    return done.stdout.rstrip("\n")

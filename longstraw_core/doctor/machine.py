"""Checks of this machine: Python, pinned packages, disk space, and whether processes can talk through torch."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

from longstraw_core.doctor.check import Skipped
from longstraw_core.spec.errors import SpecError

OLDEST_PYTHON = (3, 11)
DISTRIBUTION = "longstraw"
SMOKE_SECONDS = 120

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*==\s*(?P<version>[^;\s]+)(?P<marker>\s*;.*)?$")

_SMOKE = """
import datetime, sys, torch, torch.distributed as dist
rank, world, backend, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world,
                        timeout=datetime.timedelta(seconds=60))
x = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(x)
assert bool((x == world * (world + 1) / 2).all()), x[:4]
dist.destroy_process_group()
"""


def check_packages() -> str:
    """Compare Python and every exactly pinned package with what is installed.

    Raises:
        SpecError: naming each difference.
    """
    if sys.version_info < OLDEST_PYTHON:
        raise SpecError(f"Python {sys.version.split()[0]} is too old; {'.'.join(map(str, OLDEST_PYTHON))} is needed")
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise SpecError(f"the package {DISTRIBUTION} is not installed in {sys.prefix}") from None
    wrong = list(differing_pins(requirements))
    if wrong:
        raise SpecError("; ".join(wrong))
    return f"Python {sys.version.split()[0]}, every pinned package as asked for"


def differing_pins(requirements: list[str]) -> list[str]:
    """Return one text per exactly pinned requirement that is missing or installed in another version.

    A requirement of an optional role counts only where its package is installed.
    """
    wrong: list[str] = []
    for requirement in requirements:
        pin = _PIN.match(requirement)
        if pin is None:
            continue
        try:
            installed = metadata.version(pin["name"])
        except metadata.PackageNotFoundError:
            if not pin["marker"]:
                wrong.append(f"{pin['name']} is missing, {pin['version']} is asked for")
            continue
        if installed.partition("+")[0] != pin["version"]:
            wrong.append(f"{pin['name']} is {installed}, {pin['version']} is asked for")
    return wrong


def check_disk(directory: Path, least_gb: float) -> str:
    """Check the free space below a directory.

    Raises:
        SpecError: less than `least_gb` · 10^9 bytes are free.
    """
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < least_gb:
        raise SpecError(f"{existing}: {free:.1f} GB are free, {least_gb:g} GB are asked for")
    return f"{existing}: {free:.1f} GB are free"


def check_collectives(scratch: Path) -> str:
    """All-reduce between two processes over gloo, and between this machine's accelerators over NCCL.

    Raises:
        SpecError: an all-reduce fails, gives a wrong sum or does not end; with the last line of what it printed.
        Skipped: torch is not installed here.
    """
    if util.find_spec("torch") is None:
        raise Skipped("torch is not installed here (control role)")
    import torch

    done = [_all_reduce("gloo", 2, scratch)]
    accelerators = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if accelerators:
        done.append(_all_reduce("nccl", accelerators, scratch))
    return "; ".join(done) + ("" if accelerators else "; no accelerator here, so no NCCL")


def _all_reduce(backend: str, world: int, scratch: Path) -> str:
    store = scratch / f"{backend}-store"
    commands = [
        [sys.executable, "-c", _SMOKE, str(rank), str(world), backend, str(store.resolve())] for rank in range(world)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [child.communicate(timeout=SMOKE_SECONDS)[0] for child in children]
    except subprocess.TimeoutExpired:
        raise SpecError(f"{backend}: an all-reduce of {world} processes did not end in {SMOKE_SECONDS} s") from None
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        if child.returncode:
            last = (output.strip().splitlines() or ["no output"])[-1]
            raise SpecError(f"{backend}: rank {rank} of {world} ended with {child.returncode}: {last}")
    return f"{backend}: {world} processes agree"

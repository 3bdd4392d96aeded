"""Identity of the code that runs: a digest over the installed `longstraw_core` sources, and library versions."""

import hashlib
import os
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from longstraw_core.spec import SpecError

IMAGE_VARIABLE = "LONGSTRAW_IMAGE"
"""Set by our images to `repository@sha256:…`; absent outside a container."""

WORKER_IMAGE_VARIABLE = "LONGSTRAW_WORKER_IMAGE"
"""Set by compilation on tasks that launch pods: the image of these, by digest."""

IMAGE_ROLE_VARIABLE = "LONGSTRAW_IMAGE_ROLE"
"""Set inside our images to the role they were built for; absent outside a container."""

_LIBRARIES = ("kfp", "pydantic", "tokenizers", "transformers", "torch", "peft", "safetensors", "numpy")


@cache
def source_digest() -> str:
    """`sha256:…` over path and content of every file of the package; caches compiled by Python do not count."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return "sha256:" + digest.hexdigest()


def image_digest() -> str | None:
    """Digest of the image this process runs in, None outside a container.

    Raises:
        SpecError: the variable is set to something without a digest.
    """
    reference = os.environ.get(IMAGE_VARIABLE)
    if not reference:
        return None
    match = re.fullmatch(r".+@(sha256:[0-9a-f]{64})", reference)
    if match is None:
        raise SpecError(f"{IMAGE_VARIABLE}={reference!r} is not a digest-pinned reference (repository@sha256:…)")
    return match.group(1)


def check_image_role(stage: str, role: str) -> None:
    """Check that this container was built for what `stage` needs.

    Raises:
        SpecError: the image lock names the image of another role, which lacks what the stage imports.
    """
    built_for = os.environ.get(IMAGE_ROLE_VARIABLE)
    if built_for and built_for != role:
        image = os.environ.get(IMAGE_VARIABLE, "this image")
        raise SpecError(
            f"stage {stage} needs the image of role {role}, and {image} is the one of role {built_for}: "
            f"correct {role!r} in images.lock.json and compile again"
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that are installed, by name."""
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found

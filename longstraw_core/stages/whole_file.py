"""Writes a file whole or not at all."""

import os
import re
from pathlib import Path

from longstraw_core.artifacts.files import reporting
from longstraw_core.spec import SpecError

_PARTIAL_FILE = re.compile(r"\..+\.[0-9]+\.new")


def is_partial_file(name: str) -> bool:
    """Whether a file of this name is what a killed `write_whole` left behind."""
    return _PARTIAL_FILE.fullmatch(name) is not None


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step; its directory is created when missing.

    Raises:
        SpecError: `path` is something else than a file, such as a device, which replacing would destroy.
        SpecError, Retryable: the file system refuses.
    """
    if path.exists() and not path.is_file():
        raise SpecError(f"{path} is not a regular file and is not replaced: name a file")
    with reporting(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

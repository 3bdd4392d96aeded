"""Writes a file whole or not at all."""

import os
from pathlib import Path

from longstraw_core.artifacts.files import reporting


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step; its directory is created when missing.

    Raises:
        SpecError, Retryable: the file system refuses.
    """
    with reporting(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

"""What an attacker with write access does to a run, and what a report says about it."""

from pathlib import Path


def files_of(directory: Path) -> list[str]:
    """Relative paths of all regular files but the lock."""
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    )


def blobs_of(directory: Path) -> list[str]:
    return [name for name in files_of(directory) if name.startswith("store/blobs/")]


def overwrite(path: Path, content: bytes) -> None:
    """Change a file the way an attacker would, whatever its mode."""
    path.unlink()
    path.write_bytes(content)


def named(report, path: str) -> list[str]:
    """Kinds of the faults reported for a path."""
    return [fault.kind for fault in report.faults if fault.path == path]


OTHER = "sha256:" + "0" * 64

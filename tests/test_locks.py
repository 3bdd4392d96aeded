"""The lock files: every direct dependency is pinned in its role, all roles agree, and the control role has no torch."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVELOPMENT = ROOT / "requirements-dev.lock"
ROLES = {
    "control": PROJECT["dependencies"],
    "trainer": [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["trainer"]],
    "sampler": [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["sampler"]],
}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), "a package is pinned twice"
    return {normalised(name): version for name, version in found.items()}


def names(requirements: list[str]) -> set[str]:
    return {normalised(re.split(r"[\[<>=~! ]", requirement)[0]) for requirement in requirements}


@pytest.mark.parametrize("role", ROLES)
def test_every_direct_dependency_is_pinned_and_agrees_with_development(role: str) -> None:
    locked = pins(ROOT / "images" / role / "requirements.lock")
    assert names(ROLES[role]) <= set(locked)
    development = pins(DEVELOPMENT)
    assert {name: development.get(name) for name in locked} == locked


def test_development_pins_every_tool() -> None:
    assert names(PROJECT["optional-dependencies"]["dev"]) <= set(pins(DEVELOPMENT))


def test_the_control_role_has_no_torch_and_no_lock_names_one_build_of_it() -> None:
    assert "torch" not in pins(ROOT / "images" / "control" / "requirements.lock")
    for path in (DEVELOPMENT, *(ROOT / "images" / role / "requirements.lock" for role in ROLES)):
        assert "+cpu" not in path.read_text(encoding="utf-8")

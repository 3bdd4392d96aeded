"""The lock files: every direct dependency is pinned in its role, all roles agree, and the control role has no torch."""

import re
import tomllib
from pathlib import Path

import pytest

from longstraw_core.rollout.server_command import SGLANG_VERSION

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVELOPMENT = ROOT / "requirements-dev.lock"
EXTRAS = PROJECT["optional-dependencies"]
IMAGES = {
    "control/requirements.lock": [*PROJECT["dependencies"], *EXTRAS["control"]],
    "trainer/requirements-cpu.lock": [*PROJECT["dependencies"], *EXTRAS["trainer"]],
    "trainer/requirements-cuda.lock": [*PROJECT["dependencies"], *EXTRAS["trainer"], *EXTRAS["nf4"]],
    "sampler/requirements-cpu.lock": [*PROJECT["dependencies"], *EXTRAS["sampler"]],
    "sampler/requirements-cuda.lock": [*PROJECT["dependencies"], *EXTRAS["sampler"]],
    "executor.lock": ["kfp==2.17.3"],
}
REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!-]+?)(?:\+cpu)?(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})*)"
)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(path: Path) -> list[re.Match[str]]:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [REQUIREMENT.fullmatch(line) for line in lines]
    assert None not in found, [line for line, match in zip(lines, found, strict=True) if match is None]
    return [match for match in found if match is not None]


def pins(path: Path) -> dict[str, str]:
    found = {normalised(match["name"]): match["version"] for match in requirements(path)}
    assert len(found) == len(requirements(path)), "a package is pinned twice"
    return found


def names(requirements: list[str]) -> set[str]:
    return {normalised(re.split(r"[\[<>=~! ]", requirement)[0]) for requirement in requirements}


@pytest.mark.parametrize("name", IMAGES)
def test_every_direct_dependency_is_pinned_by_hash_and_agrees_with_development(name: str) -> None:
    lock = ROOT / "images" / name
    assert names(IMAGES[name]) <= set(pins(lock))
    assert all(match["hashes"] for match in requirements(lock))
    development = pins(DEVELOPMENT)
    # what the CUDA build of torch brings besides is in no other lock
    only_cuda = {package for package in pins(lock) if package.startswith(("nvidia-", "cuda-", "triton"))}
    assert not only_cuda or "cuda" in name
    # nor is what no test needs: an extra of its own
    apart = names(EXTRAS["nf4"]) if "cuda" in name else set[str]()
    common = {package: version for package, version in pins(lock).items() if package not in only_cuda | apart}
    assert {package: development.get(package) for package in common} == common


def test_development_pins_every_tool() -> None:
    assert names(EXTRAS["dev"]) <= set(pins(DEVELOPMENT))


def test_the_tested_sglang_is_the_one_of_the_sampler_image() -> None:
    tested = pins(ROOT / "tests" / "support" / "sglang" / "requirements.lock")
    shipped = pins(ROOT / "images" / "sampler" / "sglang-cuda.lock")
    for name in ("sglang", "transformers", "tokenizers"):
        assert tested[name] == shipped[name]
    assert pins(ROOT / "images" / "sampler" / "sglang-cpu.lock") == tested
    for variant in ("cpu", "cuda"):
        assert all(match["hashes"] for match in requirements(ROOT / "images" / "sampler" / f"sglang-{variant}.lock"))
    assert tested["sglang"] == SGLANG_VERSION


def test_control_has_no_torch_and_the_others_of_kfp_nothing_but_its_executor() -> None:
    assert "torch" not in pins(ROOT / "images" / "control" / "requirements.lock")
    for path in (ROOT / "images").glob("*/requirements-c*.lock"):
        assert not set(pins(path)) & {"kfp", "kubernetes", "google-cloud-storage", "protobuf"}
    assert list(pins(ROOT / "images" / "executor.lock")) == ["kfp"]


def test_the_development_lock_names_no_build_of_torch() -> None:
    assert "+cpu" not in DEVELOPMENT.read_text(encoding="utf-8")

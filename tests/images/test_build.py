"""The image build without an engine: which locks go where, what the lock names, where bills of materials lie."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from longstraw_core.artifacts import open_store
from longstraw_core.artifacts.garbage import collect_garbage
from longstraw_core.artifacts.store import AlreadyPublished
from tests.support.fake_tools import calls, fake

IMAGES = Path(__file__).resolve().parents[2] / "images"
REFERENCE = "registry.example/longstraw/control@sha256:" + "c" * 64


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`images/build.py`, which is a script and imports its neighbours."""
    monkeypatch.syspath_prepend(str(IMAGES))
    for name in ("build", "bill_of_materials"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("build")


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_sampler_alone_has_the_server_in_an_environment_of_its_own(build: ModuleType, variant: str) -> None:
    found = {role: build.environments(role, variant, server=True) for role in build.ROLES}
    assert {role: set(locks) for role, locks in found.items()} == {
        "control": {"longstraw"},
        "trainer": {"longstraw"},
        "sampler": {"longstraw", "sglang"},
    }
    assert all(path.exists() for locks in found.values() for paths in locks.values() for path in paths)
    assert [path.name for path in found["sampler"]["sglang"]] == [f"sglang-{variant}.lock"]
    assert set(build.environments("sampler", variant, server=False)) == {"longstraw"}


def test_the_lock_names_what_the_registry_answers(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path, "buildah")
    fake(tmp_path, "skopeo", json.dumps({"Digest": "sha256:" + "e" * 64}))
    assert build.push("image", "registry.example/control", "abc", insecure=False) == (
        "registry.example/control@sha256:" + "e" * 64
    )
    pushed, asked = calls(tmp_path)
    assert pushed[:-1] == [
        "buildah",
        "push",
        "--quiet",
        "--tls-verify=true",
        "image",
        "docker://registry.example/control:abc",
    ]
    assert asked[:-1] == [
        "skopeo",
        "inspect",
        "--tls-verify=true",
        "--no-tags",
        "docker://registry.example/control:abc",
    ]


def test_what_is_no_digest_does_not_get_into_the_lock(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path, "buildah")
    fake(tmp_path, "skopeo", json.dumps({"Digest": "sha256:" + "e" * 63 + "\n"}))
    with pytest.raises(SystemExit, match="no digest; the lock is as it was"):
        build.push("image", "registry.example/control", "abc", insecure=False)


BASE = "docker.io/library/python@sha256:" + "b" * 64


@pytest.mark.parametrize(
    ("registry", "base"),
    [
        ("registry.example/longstraw", BASE),
        ("localhost:5000", "localhost:5000/base@sha256:" + "0" * 64),
        ("10.0.0.1:5000/a/b__c", "python:3.11-slim@sha256:" + "b" * 64),
    ],
)
def test_usual_names_are_taken(build: ModuleType, registry: str, base: str) -> None:
    build.check_names(registry, base)


@pytest.mark.parametrize(
    ("registry", "base", "named"),
    [
        ("https://registry.example", BASE, "--registry"),
        ("registry.example/LongStraw", BASE, "--registry"),
        ("registry.example/a:tag", BASE, "--registry"),
        ("--creds=x", BASE, "--registry"),
        ("registry.example/../x", BASE, "--registry"),
        ("", BASE, "--registry"),
        ("registry.example", "python:3.11", "--base"),
        ("registry.example", "python@sha256:" + "b" * 63, "--base"),
        ("registry.example", "python@sha256:" + "b" * 65, "--base"),
        ("registry.example", "python@sha256:" + "b" * 64 + "\nRUN true", "--base"),
        ("registry.example", "@sha256:" + "b" * 64, "--base"),
        ("registry.example", "--from@sha256:" + "b" * 64, "--base"),
    ],
)
def test_other_names_are_refused_before_anything_is_built(
    build: ModuleType, registry: str, base: str, named: str
) -> None:
    with pytest.raises(SystemExit, match=named):
        build.check_names(registry, base)


def test_credentials_in_a_registrys_name_are_not_repeated(build: ModuleType) -> None:
    with pytest.raises(SystemExit) as refused:
        build.check_names("user:hidden@registry.example", BASE)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("content", ['{"control": "a', "[]", '{"control": 1}', "\xff"])
def test_a_lock_that_is_none_is_refused_and_stays(build: ModuleType, content: str, tmp_path: Path) -> None:
    path = tmp_path / "images.lock.json"
    assert build.read_lock(path) == {}
    path.write_text(content, encoding="latin-1")
    with pytest.raises(SystemExit, match=r"images\.lock\.json: no"):
        build.read_lock(path)
    assert path.read_text(encoding="latin-1") == content


def test_the_size_is_that_of_the_layers_in_the_registry(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path, "skopeo", json.dumps({"config": {"size": 7}, "layers": [{"size": 100}, {"size": 23}]}))
    assert build.stored_bytes(REFERENCE, insecure=True) == 123
    (asked,) = calls(tmp_path)
    assert asked[:-1] == ["skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{REFERENCE}"]


def test_a_bill_of_materials_lies_under_the_digest_of_its_image_and_is_no_garbage(
    build: ModuleType, tmp_path: Path
) -> None:
    uri = (tmp_path / "store").as_uri()
    address = build.store_bill(uri, REFERENCE, "{}")
    assert address == f"{uri}/images/{'c' * 64}.cdx.json"
    assert build.store_bill(uri, REFERENCE, "{}") == address
    store = open_store(uri)
    collect_garbage(store, keep_runs=0, grace_seconds=0.0)
    described = store.describe_object(f"images/{'c' * 64}.cdx.json", "application/vnd.cyclonedx+json")
    assert store.get_bytes(described) == b"{}"
    with pytest.raises(AlreadyPublished):
        build.store_bill(uri, REFERENCE, '{"other": 1}')


def test_wheels_are_installed_by_name_so_that_no_record_has_their_archives_hash(
    build: ModuleType, tmp_path: Path
) -> None:
    for name in ("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "kfp-2.17.3-py3-none-any.whl", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert build.installed(tmp_path) == "kfp==2.17.3\ntorch==2.13.0+cpu\n"


@pytest.mark.parametrize(
    ("name", "pin"),
    [
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "torch==2.13.0+cpu"),
        ("ipython_pygments_lexers-1.1.1-py3-none-any.whl", "ipython-pygments-lexers==1.1.1"),
        ("outlines-core-0.1.26.tar.gz", "outlines-core==0.1.26"),
        ("partial_json_parser-0.2.1.1.post7-py3-none-any.whl", "partial-json-parser==0.2.1.1.post7"),
    ],
)
def test_a_file_becomes_a_pin_with_its_hash(
    name: str, pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(IMAGES))
    hash_pins = importlib.import_module("hash_pins")
    (tmp_path / name).write_bytes(b"abc")
    of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_pins.lock_line(tmp_path / name) == f"{pin} \\\n    --hash=sha256:{of_abc}\n"
    with pytest.raises(SystemExit, match=r"notes\.txt"):
        hash_pins.lock_line(tmp_path / "notes.txt")

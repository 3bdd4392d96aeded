"""The way to the real servers: never skipped where somebody asked for them, and what they are started with.

The programs here are stand-ins that only write down their arguments and say that they are ready.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import urllib3

from tests.servers.kubernetes_api import real
from tests.servers.kubernetes_api.real import API_BINARIES, CONTROLLER_BINARIES, Unusable, control_plane

ROOT = Path(__file__).parents[2]

STAND_IN = """#!{python}
import http.server, json, os, pathlib, ssl, sys
name = os.path.basename(sys.argv[0])
pathlib.Path({directory!r}, name + ".json").write_text(json.dumps([os.getpid(), *sys.argv[1:]]))
flags = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
class Ready(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments): pass
    def do_GET(self):
        self.send_response(200 if self.path in ("/readyz", "/healthz") else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
address = flags.get("--bind-address", "127.0.0.1")
port = int(flags.get("--secure-port") or flags["--listen-client-urls"].rpartition(":")[2])
server = http.server.ThreadingHTTPServer((address, port), Ready)
if "--tls-cert-file" in flags:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(flags["--tls-cert-file"], flags["--tls-private-key-file"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def install(directory: Path, names: tuple[str, ...], text: str) -> None:
    for name in names:
        program = directory / name
        program.write_text(text)
        program.chmod(0o755)


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "assets"
    directory.mkdir()
    monkeypatch.setenv(real.ASSETS_VARIABLE, str(directory))
    return directory


def stand_ins(assets: Path, names: tuple[str, ...]) -> None:
    install(assets, names, STAND_IN.format(python=sys.executable, directory=str(assets)))


def arguments_of(assets: Path, name: str) -> tuple[int, dict[str, str]]:
    """The process id of a stand-in, and its flags."""
    pid, *arguments = json.loads((assets / f"{name}.json").read_text())
    assert all(argument.startswith("--") for argument in arguments)
    return pid, {flag: value for flag, _, value in (argument.partition("=") for argument in arguments)}


def test_all_four_are_started_wait_for_each_other_and_are_gone_afterwards(assets: Path) -> None:
    stand_ins(assets, API_BINARIES + CONTROLLER_BINARIES)
    with control_plane() as plane:
        assert plane.controllers
        with urllib3.PoolManager(ca_certs=str(plane.certificate)) as pool:
            assert pool.request("GET", f"{plane.url}/readyz").status == 200
        found = {name: arguments_of(assets, name) for name in API_BINARIES + CONTROLLER_BINARIES}
        flags = {name: own for name, (_, own) in found.items()}
        tokens = Path(flags["kube-apiserver"]["--token-auth-file"]).read_text().splitlines()
        kubeconfig = Path(flags["kube-scheduler"]["--kubeconfig"]).read_text()
    assert flags["kube-apiserver"]["--etcd-servers"] == flags["etcd"]["--listen-client-urls"]
    assert flags["kube-apiserver"]["--authorization-mode"] == "RBAC"
    assert flags["kube-apiserver"]["--advertise-address"] == "127.0.0.1"
    assert [line.split(",")[3:] for line in tokens] == [["system:masters"], []]
    assert plane.url in kubeconfig
    for name in ("kube-apiserver", *CONTROLLER_BINARIES):
        assert flags[name]["--bind-address"] == "127.0.0.1"
    assert "job-controller" in flags["kube-controller-manager"]["--controllers"]
    assert not [name for name, (pid, _) in found.items() if psutil.pid_exists(pid)]


def test_without_the_controllers_the_api_server_still_runs(assets: Path) -> None:
    stand_ins(assets, API_BINARIES)
    with control_plane() as plane:
        assert not plane.controllers


@pytest.mark.parametrize("dying", API_BINARIES + CONTROLLER_BINARIES)
def test_a_program_that_ends_is_an_error_with_its_last_words(dying: str, assets: Path) -> None:
    stand_ins(assets, API_BINARIES + CONTROLLER_BINARIES)
    install(assets, (dying,), "#!/bin/sh\necho unknown flag: --kubeconfig >&2\nexit 7\n")
    if dying == "etcd":  # the API server does not become ready without it
        install(assets, ("kube-apiserver",), "#!/bin/sh\nsleep 600\n")
    with pytest.raises(Unusable, match=f"{dying} ended with status 7: unknown flag"), control_plane():
        pass


@pytest.mark.parametrize(
    ("installed", "case", "words"),
    [
        ((), "test_what_exists_is_not_created_again", "has no executable etcd, kube-apiserver"),
        (("etcd",), "test_what_exists_is_not_created_again", "has no executable kube-apiserver"),
        (API_BINARIES, "test_a_watch_tells_what_happened_after_its_version", "no executable kube-controller-manager"),
    ],
)
def test_a_directory_that_lacks_a_program_fails_the_cases_instead_of_skipping_them(
    installed: tuple[str, ...], case: str, words: str, assets: Path
) -> None:
    stand_ins(assets, installed)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    target = f"tests/cluster/test_fake_server.py::{case}[real]"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", target]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout
    assert words in result.stdout
    assert "1 error in" in result.stdout


def test_nobody_asks_and_the_cases_are_skipped_with_the_reason() -> None:
    environment = {name: value for name, value in os.environ.items() if name != real.ASSETS_VARIABLE}
    target = "tests/cluster/test_fake_server.py::test_what_exists_is_not_created_again[real]"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", target]
    result = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert "KUBEBUILDER_ASSETS is not set" in result.stdout

"""A container engine, a registry and a base image: what the machine has, or what root on Debian installs."""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import docker.errors

from tests.servers.ports import free_port

PACKAGES = ("docker.io", "containerd", "docker-registry", "debootstrap", "buildah", "runc", "skopeo")
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
# Containers in a sandbox may not raise limits, so the daemon asks for less than its default.
DAEMON_LIMITS = ("--default-ulimit", "nofile=20000:20000", "--default-ulimit", "nproc=20000:20000")
READY_SECONDS = 60.0


def install() -> None:
    """Install what is missing with apt-get; needs root on Debian."""
    tools = ("dockerd", "docker-registry", "debootstrap", "buildah", "skopeo")
    missing = [name for name in tools if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"{', '.join(missing)} missing: install them, or run as root on Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def container_engine(directory: Path) -> Iterator[str]:
    """Yield the address of a Docker engine: the running one, or a daemon that lives as long as the block."""
    try:
        docker.from_env().ping()
    except docker.errors.DockerException:
        pass
    else:
        yield os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        return
    address = f"unix://{directory}/docker.sock"
    command = ["dockerd", "--data-root", f"{directory}/data", "--exec-root", f"{directory}/exec"]
    command += ["--pidfile", f"{directory}/pid", "--host", address, *DAEMON_LIMITS]
    with _process(command, directory / "dockerd.log") as log:
        _wait(lambda: docker.DockerClient(base_url=address).ping(), log)
        yield address


@contextmanager
def registry(directory: Path) -> Iterator[str]:
    """Yield `127.0.0.1:port` of a registry that keeps its images in `directory`."""
    address = f"127.0.0.1:{free_port()}"
    configuration = directory / "registry.yml"
    configuration.write_text(
        "version: 0.1\n"
        f"storage: {{filesystem: {{rootdirectory: {directory / 'images'}}}}}\n"
        f"http: {{addr: '{address}'}}\n",
        encoding="utf-8",
    )
    with _process(["docker-registry", "serve", str(configuration)], directory / "registry.log") as log:
        _wait(lambda: urllib.request.urlopen(f"http://{address}/v2/").read(), log)
        yield address


def push_base_image(directory: Path, registry_address: str) -> str:
    """Make the base image (Debian with Python and nothing else) and return it by digest."""
    root = directory / "rootfs"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for leftover in ("var/cache/apt/archives", "var/lib/apt/lists", "var/log", "var/cache/ldconfig"):
        for path in sorted((root / leftover).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def buildah(*arguments: str) -> str:
        done = subprocess.run(["buildah", *arguments], check=True, capture_output=True, text=True, env=environment)
        return done.stdout.strip()

    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(root), "/")
    image = buildah("commit", "--quiet", "--timestamp", "0", "--rm", container)
    digest = directory / "base.digest"
    reference = f"{registry_address}/base"
    buildah("push", "--quiet", "--tls-verify=false", "--digestfile", str(digest), image, f"docker://{reference}:base")
    buildah("rmi", image)
    shutil.rmtree(root)
    return f"{reference}@{digest.read_text(encoding='utf-8').strip()}"


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[Path]:
    environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        try:
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(probe: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            probe()
            return
        except (docker.errors.DockerException, urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"not ready after {READY_SECONDS:.0f} s: {error}\n{tail}") from error
            time.sleep(0.2)

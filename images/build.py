"""Build the images, push them, and write `images.lock.json` from what the registry returned.

Needs buildah. Every file comes from the index that pip is configured for and must have a hash of the role's lock;
the build itself fetches nothing. Files and layers carry the time of the commit, so the same commit, base and locks give
the same digest on every machine.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from bill_of_materials import bill_of_materials

IMAGES = Path(__file__).resolve().parent
ROOT = IMAGES.parent
ROLES = ("control", "trainer", "sampler")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")
TAG = re.compile(r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Source:
    """The commit that is built."""

    revision: str
    epoch: int
    version: str


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed; its error output goes to ours."""
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def source_of_tree(*, allow_changes: bool) -> Source:
    """Return the commit of the working tree; uncommitted changes are refused unless they are allowed."""
    changed = run("git", "status", "--porcelain")
    if changed and not allow_changes:
        raise SystemExit(f"uncommitted changes: an image names the commit it was built from; commit first\n{changed}")
    revision = run("git", "rev-parse", "HEAD") + ("-changed" if changed else "")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return Source(revision, int(run("git", "log", "-1", "--format=%ct")), version)


def tls_option(insecure: bool) -> str:
    """Return buildah's option that says whether registries speak TLS."""
    return f"--tls-verify={str(not insecure).lower()}"


def lock_files(role: str, variant: str) -> list[Path]:
    """Return the hash-pinned requirements of a role: control has no torch and hence no variant."""
    if role == "control":
        return [IMAGES / "control" / "requirements.lock"]
    return [IMAGES / role / f"requirements-{variant}.lock", IMAGES / "executor.lock"]


def environments(role: str, variant: str, *, server: bool) -> dict[str, list[Path]]:
    """Return environment below /opt → its locks. The sampler's server has one of its own (decision 0070)."""
    found = {"longstraw": lock_files(role, variant)}
    if role == "sampler" and server:
        found["sglang"] = [IMAGES / "sampler" / f"sglang-{variant}.lock"]
    return found


def gather_wheels(locks: dict[str, list[Path]], wheels: Path, source: Source) -> None:
    """Put every wheel of every environment into a directory of its own; hashes are checked while they are fetched.

    The project's own wheel goes into `longstraw`.
    """
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    for environment, files in locks.items():
        for lock in files:
            run(*pip, "--require-hashes", "-r", str(lock), "--wheel-dir", str(wheels / environment))
    with tempfile.TemporaryDirectory() as scratch:
        # the tracked files alone: what lies about in the working tree must not get into an image
        for name in run("git", "ls-files", "longstraw_core", "components", "pipelines").splitlines():
            target = Path(scratch) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copyfile(ROOT / name, Path(scratch) / name)
        os.environ["SOURCE_DATE_EPOCH"] = str(source.epoch)
        run(*pip, "--wheel-dir", str(wheels / "longstraw"), ".", cwd=Path(scratch))
    for environment in locks:
        # by name: of a wheel given as a file pip records the archive's hash, and one made here holds the time of that
        (wheels / environment / "installed.txt").write_text(installed(wheels / environment), encoding="utf-8")


def installed(wheels: Path) -> str:
    """Return the requirements that take every wheel of a directory, one a line."""
    names = sorted(path.name.split("-")[:2] for path in wheels.glob("*.whl"))
    return "".join(f"{name}=={version}\n" for name, version in names)


def build(role: str, locks: dict[str, list[Path]], base: str, source: Source, *, insecure: bool) -> str:
    """Build one role from the locks of its environments and return the id of the local image."""
    with tempfile.TemporaryDirectory(prefix=f"longstraw-{role}-") as scratch:
        context = Path(scratch)
        gather_wheels(locks, context / "wheels", source)
        shutil.copyfile(IMAGES / "Containerfile", context / "Containerfile")
        identity = context / "image"
        arguments = {"BASE": base, "ROLE": role, "REVISION": source.revision, "VERSION": source.version}
        run(
            *(
                "buildah",
                "build",
                "--quiet",
                tls_option(insecure),
                "--format",
                "oci",
                "--isolation",
                "chroot",
                "--layers=false",
            ),
            *("--timestamp", str(source.epoch), "--iidfile", str(identity)),
            *(part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")),
            str(context),
        )
        return identity.read_text(encoding="utf-8").strip()


def push(image: str, repository: str, tag: str, *, insecure: bool) -> str:
    """Push an image and return `repository@sha256:…` as the registry answers for it."""
    run("buildah", "push", "--quiet", tls_option(insecure), image, f"docker://{repository}:{tag}")
    # what the registry says, not what was sent: it may have stored another form of the manifest
    answer = run("skopeo", "inspect", tls_option(insecure), "--no-tags", f"docker://{repository}:{tag}")
    digest = json.loads(answer)["Digest"]
    if not DIGEST.fullmatch(digest):
        raise SystemExit(
            f"{repository}:{tag}: the registry answers {digest!r}, which is no digest; the lock is as it was"
        )
    return f"{repository}@{digest}"


def stored_bytes(reference: str, *, insecure: bool) -> int:
    """Return the size of an image's layers in the registry, compressed as they lie there."""
    manifest = json.loads(run("skopeo", "inspect", tls_option(insecure), "--raw", f"docker://{reference}"))
    return sum(layer["size"] for layer in manifest["layers"])


def check_names(registry: str, base: str) -> None:
    """Refuse a registry that is no repository, or a base image that is not pinned by digest.

    Raises:
        SystemExit: it is not; a host is not repeated where it may hold credentials.
    """
    if not REPOSITORY.fullmatch(registry):
        shown = "--registry" if "@" in registry else f"--registry {registry!r}"
        raise SystemExit(f"{shown}: write host[:port]/path in lower case, without scheme, credentials or tag")
    name, _, digest = base.partition("@")
    tag = TAG.search(name, name.rfind("/") + 1)
    repository = name[: tag.start()] if tag and not REPOSITORY.fullmatch(name) else name
    if not (REPOSITORY.fullmatch(repository) and DIGEST.fullmatch(digest)):
        raise SystemExit(f"--base {base!r}: pin it by digest, repository@sha256:…; `skopeo inspect` prints it")


def read_lock(path: Path) -> dict[str, str]:
    """Return the entries of a lock that is to be rewritten; none where there is no file.

    Raises:
        SystemExit: the file is no lock.
    """
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SystemExit(f"{path}: no JSON ({error}); delete it, and build all three roles") from error
    if not (isinstance(lock, dict) and all(isinstance(value, str) for value in lock.values())):
        raise SystemExit(f"{path}: not an object of role: image; delete it, and build all three roles")
    return lock


def store_bill(store: str, reference: str, bill: str) -> str:
    """Keep an image's bill of materials in an artifact store under the image's digest; return its address.

    It is a named object, which no garbage collection deletes; another bill for the same image is refused.
    """
    from longstraw_core.artifacts import open_store

    name = f"images/{reference.partition('@sha256:')[2]}.cdx.json"
    stored = open_store(store, create=True).create_object(name, bill.encode(), "application/vnd.cyclonedx+json")
    return f"{store.rstrip('/')}/{stored.uri}"


def write_whole(path: Path, content: str) -> None:
    """Replace a file at once, never half."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    """Build and push the chosen roles; entries of other roles in the lock stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", required=True, help="host[:port]/path below which the three repositories lie")
    parser.add_argument("--base", required=True, help="base image with Python 3.11, by digest: repository@sha256:…")
    parser.add_argument("--variant", choices=("cuda", "cpu"), default="cuda", help="which build of torch")
    parser.add_argument("--role", choices=ROLES, action="append", help="one role (default: all three)")
    parser.add_argument("--without-server", action="store_true", help="leave SGLang out of the sampler image")
    parser.add_argument("--lock", type=Path, default=IMAGES / "images.lock.json", help="lock file to write")
    parser.add_argument("--bills", type=Path, default=ROOT / "build" / "sbom", help="directory for the SBOMs")
    parser.add_argument(
        "--store",
        default=os.environ.get("LONGSTRAW_STORE"),
        help="artifact store that keeps the SBOMs, for instance s3://bucket/team (default: LONGSTRAW_STORE)",
    )
    parser.add_argument("--insecure-registry", action="store_true", help="the registry speaks plain HTTP")
    parser.add_argument("--allow-changes", action="store_true", help="build a tree with uncommitted changes")
    options = parser.parse_args()
    check_names(options.registry, options.base)
    lock = read_lock(options.lock)  # before the first of many minutes
    source = source_of_tree(allow_changes=options.allow_changes)
    for role in options.role or ROLES:
        locks = environments(role, options.variant, server=not options.without_server)
        image = build(role, locks, options.base, source, insecure=options.insecure_registry)
        reference = push(image, f"{options.registry}/{role}", source.revision[:12], insecure=options.insecure_registry)
        bill = bill_of_materials(image, reference, source.epoch)
        options.bills.mkdir(parents=True, exist_ok=True)
        write_whole(options.bills / f"{role}.cdx.json", bill)
        stored = store_bill(options.store, reference, bill) if options.store else None
        # last: an image in the lock has its bill of materials
        lock[role] = reference
        write_whole(options.lock, json.dumps(lock, indent=2, sort_keys=True) + "\n")
        run("buildah", "rmi", image)  # the registry has it; here it would only fill the disk
        size = stored_bytes(reference, insecure=options.insecure_registry)
        figures = {"role": role, "image": reference, "bytes": size, "sbom": stored, "revision": source.revision}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

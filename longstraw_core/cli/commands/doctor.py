"""`longstraw doctor`: is everything there that a run needs? Nothing is changed."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from longstraw_core.artifacts import open_store
from longstraw_core.artifacts.store import path_of_file_uri
from longstraw_core.cli.command import FiniteRange, output_option, reports_errors
from longstraw_core.cli.output import OutputFormat, console, make_table, print_json, printable
from longstraw_core.cli.server_options import connect, server_options
from longstraw_core.cli.spec_file import read_spec, resolve_paths
from longstraw_core.cluster.permissions import PERMISSIONS
from longstraw_core.doctor.check import Check, Skipped, run_check
from longstraw_core.doctor.cluster import (
    check_accelerators,
    check_images,
    check_kubeflow,
    check_permissions,
    check_queue,
)
from longstraw_core.doctor.machine import check_collectives, check_disk, check_packages
from longstraw_core.kubeflow.kubernetes_access import KubernetesAccess, open_kubernetes
from longstraw_core.kubeflow.server import ServerAddress
from longstraw_core.spec import SpecError, TransactionSpec
from longstraw_core.spec.exit_codes import USAGE
from longstraw_core.stages.layout_check import check_layout
from longstraw_core.stages.snapshot import check_snapshot


@click.command(
    "doctor", epilog="Example: longstraw doctor transaction.yaml --endpoint http://localhost:8080 -n team --kubernetes"
)
@click.argument("spec", type=click.Path(path_type=Path), required=False)
@server_options
@click.option("--kubernetes", is_flag=True, help="Check the cluster too, with the current or the named kubeconfig.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Implies --kubernetes (default: ~/.kube/config).")
@click.option("--context", help="Context of the kubeconfig; implies --kubernetes.")
@click.option("--check-images", "ask_registries", is_flag=True, help="Ask the registries for every image of the lock.")
@click.option("--images", type=click.Path(path_type=Path), help="Image lock (default: images/images.lock.json).")
@click.option("--directory", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="For runs.")
@click.option("--least-free-gb", type=FiniteRange(0), default=10.0, show_default=True, help="Free space there.")
@output_option
@reports_errors
def doctor_command(
    spec: Path | None,
    address: ServerAddress | None,
    namespace: str | None,
    kubernetes: bool,
    kubeconfig: Path | None,
    context: str | None,
    ask_registries: bool,
    images: Path | None,
    directory: Path,
    least_free_gb: float,
    output: OutputFormat,
) -> None:
    """Check this machine and, with SPEC, --endpoint and --kubernetes, the store, KFP and the cluster.

    Every check runs, whatever the others found; each failure says what to do, and any makes the exit code 2. Nothing
    is changed; an s3:// store is asked with one empty object, which is removed again, whether it keeps what it says.
    """
    parsed = None if spec is None else resolve_paths(read_spec(spec), spec.parent)
    wanted = kubernetes or kubeconfig is not None or context is not None

    def access() -> KubernetesAccess:
        if not wanted:
            raise Skipped("give --kubernetes or --kubeconfig")
        return open_kubernetes(kubeconfig, context, namespace)

    checks = (
        *_store_checks(parsed),
        *_cluster_checks(parsed, address, access, images, ask_registries),
        *_machine_checks(parsed, directory, least_free_gb),
    )
    findings = [run_check(check) for check in (Check("packages", check_packages, PACKAGES_REMEDY), *checks)]
    if output == "json":
        for finding in findings:
            print_json(
                {
                    "event": "check",
                    "check": finding.check,
                    "status": finding.status,
                    "found": finding.found,
                    "remedy": finding.remedy,
                }
            )
    else:
        rows = [(entry.check, entry.status, printable(entry.found), entry.remedy) for entry in findings]
        console().print(make_table(("check", "status", "found", "what to do"), rows))
    if any(finding.status == "failed" for finding in findings):
        sys.exit(USAGE)


PACKAGES_REMEDY = "install the requirements lock of this role, see images/README.md"


def _store_checks(spec: TransactionSpec | None) -> Iterator[Check]:
    def store() -> str:
        if spec is None:
            raise Skipped("give a SPEC")
        uri = spec.storage.uri
        if uri.startswith("file://"):
            path = path_of_file_uri(uri)
            existing = next(place for place in (path, *path.parents) if place.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
                raise SpecError(f"{uri}: {existing} cannot be written to")
            return f"{uri}: a directory that can be written to"
        open_store(uri, create=True)
        return f"{uri}: reachable, and a conditional write is refused the second time"

    yield Check("store", store, "set AWS_ENDPOINT_URL_S3 and credentials; use a server that enforces If-None-Match")


def _cluster_checks(
    spec: TransactionSpec | None,
    address: ServerAddress | None,
    access: Callable[[], KubernetesAccess],
    images: Path | None,
    ask_registries: bool,
) -> Iterator[Check]:
    from components.images import image_lock

    def kubeflow() -> str:
        if address is None:
            raise Skipped("give --endpoint")
        return check_kubeflow(connect(address))

    def cluster_of_spec() -> TransactionSpec:
        if spec is None:
            raise Skipped("give a SPEC")
        return spec

    def registries() -> str:
        if not ask_registries:
            raise Skipped("give --check-images")
        return check_images(image_lock(images))

    yield Check("kubeflow", kubeflow, "check --endpoint and the token; compile with an SDK no newer than the server")
    yield Check(
        "permissions",
        lambda: check_permissions(access(), (entry for entry in PERMISSIONS if not entry.optional)),
        "let an administrator bind a role with these verbs in your namespace",
    )
    yield Check(
        "accelerators",
        lambda: check_accelerators(access(), cluster_of_spec().cluster),
        "change cluster.accelerator, node_selector or accelerators per pod; listing nodes needs a cluster role",
    )
    yield Check(
        "queue",
        lambda: check_queue(access(), cluster_of_spec().cluster),
        "create the LocalQueue or change cluster.queue",
    )
    yield Check("images", registries, "publish the image, correct its digest in the lock, or log the nodes in")


def _machine_checks(spec: TransactionSpec | None, directory: Path, least_free_gb: float) -> Iterator[Check]:
    def snapshot() -> str:
        if spec is None:
            raise Skipped("give a SPEC")
        path = Path(spec.model.snapshot)
        on_volume = any(path.is_relative_to(volume.mount_path) for volume in spec.cluster.volumes)
        if on_volume and not path.exists():
            raise Skipped(f"{path} is on a volume of the cluster, not on this machine")
        check_snapshot(path, spec.model.family)
        check_layout(path, spec.model.family, spec.layout)
        pinned = spec.model.digest or "no digest pinned in model.digest"
        return f"{path}: complete, {spec.model.family}; {pinned}"

    def collectives() -> str:
        with tempfile.TemporaryDirectory() as scratch:
            return check_collectives(Path(scratch))

    yield Check("snapshot", snapshot, "download the whole snapshot; pin it with `longstraw model snapshot DIR`")
    yield Check("collectives", collectives, "set GLOO_SOCKET_IFNAME to the right interface; NCCL_DEBUG=INFO says more")
    yield Check("disk", lambda: check_disk(directory, least_free_gb), "free space, or name another --directory")

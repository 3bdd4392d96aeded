"""The software bill of materials of a built image, in CycloneDX: Python distributions and Debian packages."""

import json
import subprocess
import uuid
from datetime import UTC, datetime

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

# Runs in the image, by its own interpreter: what is installed in any of its environments is what counts, not what a
# lock asked for.
_LISTING = """
import json, pathlib, re
from importlib import metadata
places = [str(path) for path in pathlib.Path("/opt").glob("*/lib/python3*/site-packages")]
python = sorted({(d.metadata["Name"], d.version) for d in metadata.distributions(path=places)})
status = pathlib.Path("/var/lib/dpkg/status")
debian = []
for entry in (status.read_text(encoding="utf-8") if status.exists() else "").split("\\n\\n"):
    fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", entry, re.M))
    if fields.get("Status") == "install ok installed":
        debian.append((fields["Package"], fields["Version"], fields["Architecture"]))
print(json.dumps({"python": python, "debian": sorted(debian)}))
"""


def bill_of_materials(image: str, reference: str, epoch: int) -> str:
    """Return the CycloneDX 1.6 document of a local image, the same bytes for the same image.

    Args:
        image: id of the image in buildah's local storage.
        reference: `repository@sha256:…`, the document's subject.
        epoch: time of the built commit in seconds; it stands for the document's time.
    """
    listing = json.loads(_in_container(image, _LISTING))
    repository, _, digest = reference.partition("@")
    bom = Bom()
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, reference)
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.metadata.component = Component(
        name=repository,
        version=digest,
        type=ComponentType.CONTAINER,
        bom_ref=reference,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))],
    )
    for name, version in listing["python"]:
        url = PackageURL("pypi", None, name.lower().replace("_", "-"), version)
        bom.components.add(_library(name, version, url))
    for name, version, architecture in listing["debian"]:
        url = PackageURL("deb", "debian", name, version, {"arch": architecture})
        bom.components.add(_library(name, version, url))
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)


def _library(name: str, version: str, url: PackageURL) -> Component:
    return Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=url.to_string())


def _in_container(image: str, program: str) -> str:
    container = subprocess.run(["buildah", "from", image], check=True, capture_output=True, text=True).stdout.strip()
    try:
        return subprocess.run(
            ["buildah", "run", "--isolation", "chroot", container, "--", "python3", "-c", program],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    finally:
        subprocess.run(["buildah", "rm", container], check=True, capture_output=True)

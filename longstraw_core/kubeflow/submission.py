"""What must hold before a specification is sent to a cluster, and its run-time parameters from texts. No I/O here."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from longstraw_core.artifacts.receipts import receipt_name
from longstraw_core.kubeflow.lint import lint_pipeline
from longstraw_core.spec.cluster import Quantity
from longstraw_core.spec.descriptors import Descriptor
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.parse import parse_transaction_spec
from longstraw_core.spec.transaction import TransactionSpec

MAX_PARAMETER_BYTES = 10_000
"""KFP's API server (2.17) refuses runs whose parameters are longer in all."""

PIPELINE_ROOT_SCHEMES = ("s3://", "gs://", "minio://")


def check_for_cluster(spec: TransactionSpec) -> None:
    """Refuse a specification that only makes sense on one machine.

    Raises:
        SpecError: a path that no pod would find; one line per fault.
    """
    problems = list(cluster_problems(spec))
    if problems:
        raise SpecError("\n".join(problems))


def cluster_problems(spec: TransactionSpec) -> Iterator[str]:
    """Yield one line for every path of a specification that no pod would find."""
    mounts = [PurePosixPath(volume.mount_path) for volume in spec.cluster.volumes]
    known = ", ".join(map(str, mounts)) or "none"

    def on_a_volume(path: PurePosixPath) -> bool:
        return ".." not in path.parts and any(mount == path or mount in path.parents for mount in mounts)

    for field, text in (("model.snapshot", spec.model.snapshot), ("data.path", spec.data.path)):
        path = PurePosixPath(text)
        if not path.is_absolute():
            yield f"{field}: {text} is relative; a pod needs an absolute path on a volume of cluster.volumes ({known})"
        elif not on_a_volume(path):
            yield f"{field}: {text} is on no volume of cluster.volumes ({known}); no pod would find it"
    uri = spec.storage.uri
    if uri.startswith("file://"):
        path = PurePosixPath(unquote(uri.removeprefix("file://")))
        if not path.is_absolute() or not on_a_volume(path):
            yield f"storage.uri: {uri}: pods share no disk; use s3://bucket/prefix, or a volume of cluster.volumes"


def check_pipeline(pipeline: dict[str, Any], lock: Mapping[str, str]) -> None:
    """Refuse a compiled pipeline that `longstraw lint` objects to.

    Raises:
        SpecError: one line per finding, or that there is no image lock.
    """
    if not lock:
        raise SpecError(
            "no image is published: name an image lock with --images (a JSON object, name → repository@sha256:…)"
        )
    findings = lint_pipeline(pipeline, set(lock.values()))
    if findings:
        raise SpecError("\n".join(str(finding) for finding in findings))


def run_parameters(pipeline: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the run's parameters from `NAME=VALUE` texts, typed as the pipeline declares them.

    A text stays a text, whatever it looks like; lists and objects are JSON.

    Raises:
        SpecError: an unknown name, a value of the wrong type or one that a stage or Kubernetes would refuse, or more
            bytes than KFP takes.
    """
    declared: dict[str, Any] = pipeline["root"].get("inputDefinitions", {}).get("parameters", {})
    parameters: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in declared:
            known = ", ".join(sorted(declared))
            raise SpecError(f"--param {assignment}: must be NAME=VALUE with one of the names {known}")
        if name in parameters:
            raise SpecError(f"--param {name} is there twice")
        parameters[name] = _typed(name, text, str(declared[name]["parameterType"]))
    size = len(json.dumps(parameters).encode())
    if size > MAX_PARAMETER_BYTES:
        raise SpecError(f"--param: {size} bytes in all; KFP takes {MAX_PARAMETER_BYTES}")
    _check_values(parameters)
    return parameters


def _check_values(parameters: Mapping[str, Any]) -> None:
    """Refuse texts that would only fail in a pod, after others have used accelerators."""
    for name, value in parameters.items():
        try:
            if name == "run":
                receipt_name(value, 1, "audit_data")
            elif name == "spec":
                check_for_cluster(parse_transaction_spec(value, "spec"))
            elif name == "parent_checkpoint" and value.strip():
                Descriptor.model_validate_json(value)
            elif name.endswith(("_cpu", "_memory")):
                _QUANTITY.validate_python(value)
            elif name.endswith("_accelerators") and re.fullmatch("[0-9]{1,2}", value) is None:
                raise SpecError(f"{value!r} is no number of accelerators")
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise SpecError(f"--param {name}: {value!r}: {problem}") from error
        except SpecError as error:
            raise SpecError("\n".join(f"--param {name}: {line}" for line in str(error).splitlines())) from error


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


_QUANTITY: TypeAdapter[str] = TypeAdapter(Quantity)
_JSON_TYPES: dict[str, type[Any] | tuple[type[Any], ...]] = {
    "LIST": list,
    "STRUCT": dict,
    "NUMBER_INTEGER": int,
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": bool,
}


def _typed(name: str, text: str, kind: str) -> Any:
    if kind == "STRING":
        return text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        raise SpecError(f"--param {name}: {text!r} is not JSON, and {name} is a {kind}") from error
    if not isinstance(value, _JSON_TYPES[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
        raise SpecError(f"--param {name}: {text!r} is not a {kind}")
    return value

"""Checks of a compiled pipeline (KFP IR): pinned images, nothing installed at run time, no secret, no cache. No I/O."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.images import how_to_get_a_digest, image_problem

MAX_ARGUMENT_BYTES = 100_000
"""Linux refuses one argument of 131,072 bytes (MAX_ARG_STRLEN); the rest is room for what KFP substitutes."""

_DRIVER_STUBS = ("argostub/createpvc", "argostub/deletepvc")
"""Not images: KFP's driver does these itself."""

_INSTALLS = re.compile(r"\b(?:pip3?|uv pip|conda|mamba|apt-get|apt|apk|dnf|yum)\s+(?:-\S+\s+)*(?:install|add)\b")
_INSTALLS_LIST = re.compile(r"""["']pip3?["']\s*,\s*["']install["']""")
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:secret|token|passw(?:or)?d|credentials?|(?:private|access|api)_?key)(?:_id)?(?:_|$)", re.IGNORECASE
)
_FILE_NAME = re.compile(r"_(?:file|path|dir|directory)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|hf_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\."
    r"|://[^/\s:@]+:[^/\s@]+@"
)
"""Keys of Amazon, PEM private keys, tokens of GitHub, Hugging Face and Slack, JWTs, and passwords in URLs."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one task."""

    task: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.task}: {self.message}"


def load_pipeline(content: str | bytes, source: str) -> dict[str, Any]:
    """Return the pipeline document of a compiled file.

    Raises:
        SpecError: not YAML, or not a compiled KFP pipeline.
    """
    try:
        documents = list(yaml.load_all(content, Loader=yaml.CSafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if isinstance(document, dict) and "deploymentSpec" in document and "root" in document:
            return document  # type: ignore[reportUnknownVariableType]
    raise SpecError(f"{source}: not a compiled pipeline (no deploymentSpec); `longstraw compile` writes one")


def lint_pipeline(pipeline: dict[str, Any], allowed_images: Collection[str]) -> list[Finding]:
    """Return everything that is wrong, in the order of the tasks' names.

    Args:
        pipeline: The pipeline document of a compiled file.
        allowed_images: The image references of the lock.
    """
    used_by = _executors_by_task(pipeline)
    executors: dict[str, Any] = pipeline["deploymentSpec"].get("executors", {})
    findings: list[Finding] = []
    for name, executor in sorted(executors.items()):
        container = executor.get("container")
        if container is None or container.get("image") in _DRIVER_STUBS:
            continue  # an importer, or work of the driver: no image is pulled
        for task in sorted(used_by.get(name, [name])):
            findings += _image(task, str(container.get("image", "")), allowed_images)
            findings += _arguments(task, [*container.get("command", []), *container.get("args", [])])
            findings += _environment(task, container.get("env", []))
    for task, fields in _tasks(pipeline):
        if "enableCache" in fields.get("cachingOptions", {}) and fields["cachingOptions"]["enableCache"]:
            findings.append(
                Finding(task, "caching", "caching is on; call set_caching_options(False): sampling must not be reused")
            )
    for name, parameter in pipeline["root"].get("inputDefinitions", {}).get("parameters", {}).items():
        if _SECRET_VALUE.search(str(parameter.get("defaultValue", ""))):
            findings.append(
                Finding(f"parameter {name}", "secret", "its default looks like a secret; KFP prints parameters in logs")
            )
    return sorted(set(findings), key=lambda finding: (finding.task, finding.rule, finding.message))


def _image(task: str, image: str, allowed: Collection[str]) -> Iterator[Finding]:
    if "{{" in image:
        yield Finding(task, "image", f"image {image} is decided at run time; compile it in from the lock")
    elif (problem := image_problem(image)) is not None:
        yield Finding(task, "image", f"image {image!r} {problem}; {how_to_get_a_digest(image)} in the image lock")
    elif image not in allowed:
        yield Finding(task, "image", f"image {image} is not in the image lock")


def _arguments(task: str, arguments: list[str]) -> Iterator[Finding]:
    for argument in arguments:
        if _INSTALLS.search(argument) or _INSTALLS_LIST.search(argument):
            yield Finding(task, "install", "installs packages at run time; put them into the image")
        size = len(argument.encode())
        if size > MAX_ARGUMENT_BYTES:
            yield Finding(task, "size", f"an argument has {size} bytes, the limit is {MAX_ARGUMENT_BYTES}")
        if _SECRET_VALUE.search(argument):
            yield Finding(task, "secret", "an argument looks like a secret; use a Kubernetes secret as environment")


def _environment(task: str, environment: list[dict[str, Any]]) -> Iterator[Finding]:
    for variable in environment:
        name, value = str(variable.get("name", "")), str(variable.get("value", ""))
        named = _SECRET_NAME.search(name) and not _FILE_NAME.search(name)
        if value and (named or _SECRET_VALUE.search(value)):
            yield Finding(
                task, "secret", f"environment variable {name} has a literal value; use a Kubernetes secret instead"
            )


def _tasks(pipeline: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every task that runs a container, wherever it is nested, with its name."""
    components: dict[str, Any] = pipeline.get("components", {})
    for body in (pipeline["root"], *components.values()):
        for name, task in body.get("dag", {}).get("tasks", {}).items():
            component = components.get(task.get("componentRef", {}).get("name", ""), {})
            if "executorLabel" in component:
                yield name, task


def _executors_by_task(pipeline: dict[str, Any]) -> dict[str, list[str]]:
    components: dict[str, Any] = pipeline.get("components", {})
    found: dict[str, list[str]] = {}
    for name, task in _tasks(pipeline):
        label = components[task["componentRef"]["name"]]["executorLabel"]
        if name not in found.setdefault(label, []):
            found[label].append(name)
    return found

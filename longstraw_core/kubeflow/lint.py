"""Checks of a compiled pipeline (KFP IR): pinned images, nothing installed at run time, no secret, no cache. No I/O."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from longstraw_core.kubeflow.pipeline_shape import check_shape
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.images import how_to_get_a_digest, image_problem
from longstraw_core.stages.source import IMAGE_VARIABLE, WORKER_IMAGE_VARIABLE

MAX_ARGUMENT_BYTES = 100_000
"""Linux refuses one argument of 131,072 bytes (MAX_ARG_STRLEN); the rest is room for what KFP substitutes."""

_DRIVER_STUBS = ("argostub/createpvc", "argostub/deletepvc")
"""Not images: KFP's driver does these itself."""

_OPTIONS = r"(?:\s+-\S+(?:\s+[^-\s]\S*)??)*"
"""Options between a program and its verb, each with or without a value of its own."""
_INSTALLS = re.compile(
    rf"\b(?:(?:pip[0-9.]*|conda|mamba|micromamba|poetry|npm|apt-get|apt|apk|dnf|microdnf|yum){_OPTIONS}"
    rf"\s+(?:install|add|download)|uv{_OPTIONS}\s+(?:pip{_OPTIONS}\s+(?:install|sync)|sync|add)|easy_install)\b"
)
_INSTALLS_LIST = re.compile(r"""["']pip[0-9.]*["']\s*,(?:\s*["']-[^"']*["']\s*,)*\s*["']install["']""")
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:secret|token|passw(?:or)?d|credentials?|(?:private|access|api)_?key)(?:_id)?(?:_|$)", re.IGNORECASE
)
_WORD_BYTES = 256
"""A longer argument is a text of its own, not a word of a command."""
_FILE_NAME = re.compile(r"_(?:file|path|dir|directory|name)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|github_pat_[A-Za-z0-9_]{36,}|glpat-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.|://[^/\s:@]*:[^/\s@]+@"
)
"""Keys of Amazon, PEM private keys, tokens of GitHub, GitLab, Hugging Face and Slack, JWTs, and passwords in URLs."""


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
        SpecError: not YAML, or not a compiled KFP pipeline, or a part of it is not what it must be.
    """
    try:
        # by aliases a small file expands into a huge value, and no compiler writes them
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, Loader=yaml.CSafeLoader)):
            raise SpecError(f"{source}: YAML aliases are not accepted; `longstraw compile` writes none")
        documents = list(yaml.load_all(content, Loader=yaml.CSafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if isinstance(document, dict) and "deploymentSpec" in document and "root" in document:
            pipeline: dict[str, Any] = document  # type: ignore[reportUnknownVariableType]
            check_shape(pipeline, source)
            return pipeline
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
            findings += _images_of_variables(task, container, allowed_images)
    for task, fields in _tasks(pipeline):
        if "enableCache" in fields.get("cachingOptions", {}) and fields["cachingOptions"]["enableCache"]:
            findings.append(
                Finding(task, "caching", "caching is on; call set_caching_options(False): sampling must not be reused")
            )
    for name, value in _written_values(pipeline):
        findings += _value(name, value)
    return sorted(set(findings), key=lambda finding: (finding.task, finding.rule, finding.message))


def _image(task: str, image: str, allowed: Collection[str]) -> Iterator[Finding]:
    if "{{" in image:
        yield Finding(task, "image", f"image {image} is decided at run time; compile it in from the lock")
    elif (problem := image_problem(image)) is not None:
        yield Finding(task, "image", f"image {image!r} {problem}; {how_to_get_a_digest(image)} in the image lock")
    elif image not in allowed:
        yield Finding(task, "image", f"image {image} is not in the image lock")


def _images_of_variables(task: str, container: dict[str, Any], allowed: Collection[str]) -> Iterator[Finding]:
    """The image that a launching task gives its pods, and the one that a task states in its receipts."""
    for variable in container.get("env", []):
        name, value = variable.get("name"), str(variable.get("value", ""))
        if name == WORKER_IMAGE_VARIABLE:
            for finding in _image(task, value, allowed):
                yield Finding(task, "image", f"{name}, the image of the pods that it launches: {finding.message}")
        elif name == IMAGE_VARIABLE and container.get("image") in allowed and value != container["image"]:
            yield Finding(task, "image", f"{name} says {value!r}, and the task runs in {container.get('image')}")


def _arguments(task: str, arguments: list[str]) -> Iterator[Finding]:
    # a command is a list of words, so that program and verb may be two of them; `\\` continues a line of a shell
    texts = [*arguments, " ".join(text for text in arguments if len(text) < _WORD_BYTES)]
    if any(_INSTALLS.search(text.replace("\\\n", " ")) or _INSTALLS_LIST.search(text) for text in texts):
        yield Finding(task, "install", "installs packages at run time; put them into the image")
    for argument in arguments:
        size = len(argument.encode())
        if size > MAX_ARGUMENT_BYTES:
            yield Finding(task, "size", f"an argument has {size} bytes, the limit is {MAX_ARGUMENT_BYTES}")
        if _SECRET_VALUE.search(argument):
            yield Finding(task, "secret", "an argument looks like a secret; use a Kubernetes secret as environment")


def _value(name: str, value: Any) -> Iterator[Finding]:
    """A parameter reaches its task inside of one argument, and KFP prints it in logs."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    size = len(text.encode())
    if size > MAX_ARGUMENT_BYTES:
        yield Finding(name, "size", f"its value has {size} bytes, the limit is {MAX_ARGUMENT_BYTES}")
    if _SECRET_VALUE.search(text):
        yield Finding(name, "secret", "its value looks like a secret; KFP prints parameters in logs")


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


def _written_values(pipeline: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value that the file gives a parameter, as a default or as a constant of a task, with where it is."""
    components: dict[str, Any] = pipeline.get("components", {})
    for body in (pipeline["root"], *components.values()):
        for name, parameter in body.get("inputDefinitions", {}).get("parameters", {}).items():
            if "defaultValue" in parameter:
                yield f"parameter {name}", parameter["defaultValue"]
        for task, fields in body.get("dag", {}).get("tasks", {}).items():
            for name, source in fields.get("inputs", {}).get("parameters", {}).items():
                if "constant" in source.get("runtimeValue", {}):
                    yield f"{task}, parameter {name}", source["runtimeValue"]["constant"]

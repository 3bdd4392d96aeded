"""YAML text to plain values by the YAML 1.2 core schema, with line numbers; refuses duplicate keys and aliases."""
# pyright: basic
# PyYAML's types are incomplete; what leaves this module is typed.

import re
from typing import Any

import yaml
from yaml.composer import ComposerError

from longstraw_core.spec.errors import SpecError

FieldPath = tuple[str | int, ...]


class _CoreSchemaLoader(yaml.SafeLoader):
    """YAML 1.2 core schema: `1e-5` is a number, `010`, `1:30`, `yes` and dates are not silently converted."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's protocol

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, by which a small file expands into a huge value, and explicit types such as `!!binary`."""
        event: Any = self.peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise ComposerError(None, None, "aliases are not accepted", mark)
        if getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, f"type tags ({event.tag}) are not accepted", mark)
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreSchemaLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_CoreSchemaLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def _lines_by_path(node: yaml.Node, path: FieldPath, source: str, lines: dict[FieldPath, int]) -> None:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise SpecError(f"{source}:{key.start_mark.line + 1}: keys must be plain strings")
            if key.value in seen:
                raise SpecError(
                    f"{source}:{key.start_mark.line + 1}: {dotted((*path, key.value))} appears twice; keep one"
                )
            seen.add(key.value)
            _lines_by_path(value, (*path, key.value), source, lines)
            lines[(*path, key.value)] = key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            _lines_by_path(item, (*path, position), source, lines)


def dotted(path: FieldPath) -> str:
    """`("lora", "targets", 0)` → `lora.targets[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text or "(top level)"


def load_yaml(text: str, source: str) -> tuple[Any, dict[FieldPath, int]]:
    """Return the plain value of one YAML document and the line of every field.

    Raises:
        SpecError: not YAML, empty, a duplicate key or an alias; the message names `source` and line.
    """
    lines: dict[FieldPath, int] = {}
    try:
        loader = _CoreSchemaLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise SpecError(f"{source}: the file is empty")
            _lines_by_path(node, (), source, lines)
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error

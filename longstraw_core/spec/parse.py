"""Specification text (YAML) to `TransactionSpec`; every wrong field becomes one line that says where and what."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from longstraw_core.spec.core_yaml import FieldPath, dotted, load_yaml
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.transaction import TransactionSpec

MAX_SPEC_BYTES = 1 << 20


def _fields_at(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """Names of the fields allowed in the mapping that contains the last part of `path`."""
    current: Any = model
    for part in path:
        candidates = [current, *get_args(current)]
        models = [item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)]
        if not models or part not in models[0].model_fields:
            return []
        current = models[0].model_fields[str(part)].annotation
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []


def describe_validation_errors(
    error: ValidationError,
    model: type[BaseModel],
    source: str,
    value: Any,
    places: dict[FieldPath, str] | None = None,
) -> list[str]:
    """One line per wrong field: `file:line: field.path: value …: what is allowed`.

    `value` is the plain object that was validated; `places` says where a field was written, when that is known.
    """
    grouped: dict[FieldPath, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        # pydantic appends union members and tags to the location: keep the part that exists in the value
        location: list[str | int] = []
        current: Any = value
        for part in item["loc"]:
            if isinstance(current, dict) and (part in current or item["type"] == "missing"):
                current = cast("dict[Any, Any]", current).get(part)
            elif isinstance(current, list) and isinstance(part, int) and part < len(cast("list[Any]", current)):
                current = cast("list[Any]", current)[part]
            else:
                break
            location.append(part)
        grouped.setdefault(tuple(location), []).append(dict(item))
    messages: list[str] = []
    for path, items in grouped.items():
        known = path
        while places and known not in places and known:
            known = known[:-1]
        where = places[known] if places and known in places else source
        texts: list[str] = []
        for item in items:
            if item["type"] == "extra_forbidden":
                allowed = ", ".join(_fields_at(model, path[:-1]))
                texts.append(f"unknown field; allowed: {allowed}" if allowed else "unknown field")
            elif item["type"] == "missing":
                texts.append("required field is missing")
            elif item["type"] in ("value_error", "assertion_error"):
                texts.append(str(item["msg"]).removeprefix("Value error, "))
            else:
                texts.append(_plain(str(item["msg"])))
        shown = (
            "" if any(item["type"] == "missing" for item in items) or not path else f" {_shorten(items[0]['input'])}"
        )
        messages.append(f"{where}: {dotted(path)}:{shown} {'; or '.join(dict.fromkeys(texts))}".replace(":  ", ": "))
    return messages


def _plain(message: str) -> str:
    return (message[0].lower() + message[1:]).replace("input should be", "must be").replace("should", "must")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _apply_override(value: dict[str, Any], override: str) -> FieldPath:
    """Set one `field.path=value` (the value is YAML) in the plain specification; return the field's path."""
    path, equals, text = override.partition("=")
    parts = path.split(".")
    if not equals or not all(parts):
        raise SpecError(f"--set {override}: must be FIELD.PATH=VALUE, for instance objective.gradient=exact")
    new, _ = load_yaml(text, f"--set {path}") if text.strip() else (None, {})
    current = value
    for part in parts[:-1]:
        inner: Any = current.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SpecError(f"--set {override}: {part} is not a group of fields")
        current = cast("dict[str, Any]", inner)
    current[parts[-1]] = new
    return tuple(parts)


def parse_transaction_spec(text: str | bytes, source: str, *, overrides: Sequence[str] = ()) -> TransactionSpec:
    """Parse and validate one specification (YAML or JSON).

    Args:
        text: The file's content.
        source: Name used in messages, normally the file's path.
        overrides: `field.path=value` texts that replace fields before validation; values are YAML.

    Raises:
        SpecError: not UTF-8, not YAML, a duplicate key, an alias, or a wrong field; one line per fault.
    """
    if len(text) > MAX_SPEC_BYTES:
        raise SpecError(f"{source}: {len(text)} bytes is too long for a specification (limit {MAX_SPEC_BYTES})")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise SpecError(f"{source}: not UTF-8 text: {error}") from error
    value, lines = load_yaml(decoded, source)
    if not isinstance(value, dict):
        raise SpecError(f"{source}: the top level must be a mapping of fields, not {type(value).__name__}")
    places = {path: f"{source}:{line}" for path, line in lines.items()}
    for override in overrides:
        path = _apply_override(cast("dict[str, Any]", value), override)
        places[path] = f"--set {_shorten(override)[1:-1]}"
    try:
        # Strict JSON mode: no string-to-number or boolean-to-number conversion; lists become tuples.
        return TransactionSpec.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise SpecError("\n".join(describe_validation_errors(error, TransactionSpec, source, value, places))) from error

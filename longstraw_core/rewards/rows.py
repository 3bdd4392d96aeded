"""One DAPO-style row, from JSONL or Parquet: what it must look like, and every way in which it does not."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

ROLES = ("system", "user", "assistant")
NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters other than tab, line feed and carriage return, and halves of surrogate pairs."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""No encoding has these: they are never text, whatever the policy."""
ProblemKind = Literal[
    "wrong_types",
    "bad_truths",
    "control_characters",
    "too_long_prompts",
    "duplicates",
    "conflicting_truths",
    "unusable",
]
"""Kinds are called like the policies of `data` that decide about them; `unusable` is always fatal."""
INDEX_AS_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""An `extra_info.index` of this form may serve as a prompt id (and therefore in file names)."""


@dataclass(frozen=True)
class RowProblem:
    """What is wrong with one field of a row and what to do about it."""

    field: str
    what: str
    remedy: str
    kind: ProblemKind = "wrong_types"

    def at(self, place: str) -> str:
        """Return the problem as one line."""
        return f"{place}: {self.field}: {self.what}; {self.remedy}"


class RowRefused(Exception):
    """The row cannot be used; carries all its problems."""

    def __init__(self, problems: list[RowProblem]) -> None:
        super().__init__("; ".join(problem.at("row") for problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class Row:
    """The fields of a sound row that the transaction uses."""

    messages: tuple[tuple[str, str], ...]
    """Role and content of each chat message."""
    ground_truth: str
    data_source: str
    index: str | None
    """`extra_info.index` when it can serve as a prompt id."""
    notes: tuple[RowProblem, ...] = ()
    """Problems that the policy keeps."""

    def prompt_digest(self) -> bytes:
        """Identify the prompt: equal exactly for equal roles and contents."""
        encoded = json.dumps(self.messages, ensure_ascii=True, separators=(",", ":")).encode("ascii")
        return hashlib.blake2b(encoded, digest_size=16).digest()


def shown(value: object) -> str:
    """Return a value of the file as it may appear in a message: quoted, on one line, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_row(
    fields: dict[str, Any], check_truth: Callable[[str], str | None], *, keep_control_characters: bool = False
) -> Row:
    """Check the fields of one row; `check_truth` says why the scorer cannot use a ground truth (None: it can).

    Raises:
        RowRefused: with every problem of the row, not only the first.
    """
    problems: list[RowProblem] = []
    messages = _messages(fields.get("prompt"), problems)
    ground_truth = _ground_truth(fields.get("reward_model"), check_truth, problems)
    data_source = fields.get("data_source")
    if not isinstance(data_source, str):
        problems.append(_wrong_type("data_source", 'a string such as "math_dapo"', fields, "data_source"))
    else:
        _check_text(data_source, "data_source", problems)
    if not isinstance(fields.get("ability", ""), str):
        problems.append(_wrong_type("ability", "a string", fields, "ability"))
    extra_info = fields.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        problems.append(_wrong_type("extra_info", "an object", fields, "extra_info"))
    notes: list[RowProblem] = []
    if keep_control_characters:
        notes = [problem for problem in problems if problem.kind == "control_characters"]
        problems = [problem for problem in problems if problem.kind != "control_characters"]
    if problems:
        raise RowRefused(problems)
    index = extra_info.get("index") if isinstance(extra_info, dict) else None
    return Row(
        messages=tuple(messages),
        ground_truth=ground_truth,
        data_source=str(data_source),
        index=index if isinstance(index, str) and INDEX_AS_ID.fullmatch(index) else None,
        notes=tuple(notes),
    )


def parse_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RowRefused([RowProblem("row", f"not UTF-8 at byte {error.start}", "save the file as UTF-8")]) from error
    except (ValueError, RecursionError) as error:
        problem = RowProblem("row", f"not JSON: {error}", "write one JSON object per line")
        raise RowRefused([problem]) from error
    if not isinstance(value, dict):
        problem = RowProblem("row", f"is {_kind(value)}, expected an object", "write one JSON object per line")
        raise RowRefused([problem])
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shown(repeated)} appears twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _messages(prompt: object, problems: list[RowProblem]) -> list[tuple[str, str]]:
    example = 'write [{"role": "user", "content": "..."}]'
    if not isinstance(prompt, list) or not prompt:
        what = "is missing" if prompt is None else "is an empty list" if prompt == [] else f"is {_kind(prompt)}"
        problems.append(RowProblem("prompt", f"{what}, expected a list of chat messages", example))
        return []
    messages: list[tuple[str, str]] = []
    for position, message in enumerate(prompt):
        name = f"prompt[{position}]"
        if not isinstance(message, dict):
            problems.append(RowProblem(name, f"is {_kind(message)}, expected a chat message", example))
            continue
        unknown = sorted(set(message) - {"role", "content"})
        if unknown:
            what = f"unknown key {shown(unknown[0])}"
            problems.append(RowProblem(name, what, "keep only role and content; nothing else reaches the model"))
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            problems.append(RowProblem(f"{name}.role", f"is {shown(role)}", f"use one of {', '.join(ROLES)}"))
        if not isinstance(content, str):
            what = "is missing" if content is None else f"is {_kind(content)}, expected a string"
            problems.append(RowProblem(f"{name}.content", what, "write the text of the message"))
        elif not content.strip():
            problems.append(RowProblem(f"{name}.content", "is empty", "write the text of the message"))
        else:
            _check_text(content, f"{name}.content", problems)
        messages.append((str(role), str(content)))
    if messages and messages[-1][0] in ROLES and messages[-1][0] != "user":
        what = f"last message has role {messages[-1][0]!r}"
        problems.append(RowProblem("prompt", what, "end with the user's message; the model answers next"))
    return messages


def _ground_truth(reward_model: object, check_truth: Callable[[str], str | None], problems: list[RowProblem]) -> str:
    name = "reward_model.ground_truth"
    remedy = "write the reference answer as a string, or remove the row"
    if not isinstance(reward_model, dict):
        what = "is missing" if reward_model is None else f"not there: reward_model is {_kind(reward_model)}"
        kind: ProblemKind = "bad_truths" if reward_model is None else "wrong_types"
        problems.append(RowProblem(name, what, remedy, kind))
        return ""
    truth = reward_model.get("ground_truth")
    if not isinstance(truth, str):
        what = "is missing" if truth is None else f"is {_kind(truth)} {shown(truth)}, expected a string"
        problems.append(RowProblem(name, what, remedy, "bad_truths" if truth is None else "wrong_types"))
        return ""
    if not truth.strip():
        problems.append(RowProblem(name, "is empty", remedy, "bad_truths"))
        return truth
    if _check_text(truth, name, problems) and (why := check_truth(truth)) is not None:
        problems.append(RowProblem(name, f"{shown(truth)} {why}", "correct it or remove the row", "bad_truths"))
    return truth


def _check_text(text: str, field: str, problems: list[RowProblem]) -> bool:
    bad = NOT_TEXT.search(text)
    if bad is None:
        return True
    halves = HALF_PAIR.search(text)
    bad = halves or bad
    name = "half of a surrogate pair" if halves else "control character"
    what = f"{name} U+{ord(bad[0]):04X} at character {bad.start()}"
    kind: ProblemKind = "wrong_types" if halves else "control_characters"
    problems.append(RowProblem(field, what, "remove it; only tab and line ends are accepted", kind))
    return False


def _wrong_type(field: str, expected: str, fields: dict[str, Any], key: str) -> RowProblem:
    what = f"is {_kind(fields[key])}" if key in fields else "is missing"
    return RowProblem(field, f"{what}, expected {expected}", "correct the field")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)

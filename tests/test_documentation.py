"""The documentation is true: every command in it exists with these options, every link and file it names is there."""

import re
import shlex
from pathlib import Path

import click
import pytest

from longstraw_core.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".venv-sglang", ".tools", "runs", "build", ".pytest_cache"} & set(path.relative_to(ROOT).parts)
)
COMMAND = re.compile(r"(?:\.venv/bin/)?longstraw (?P<rest>[a-z][^`\n|#]*)")
PLACEHOLDERS = {"NAME": "train", "…": ""}


def documented_commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for match in COMMAND.finditer(page.read_text(encoding="utf-8")):
            found.append((str(page.relative_to(ROOT)), match["rest"].strip().rstrip(".,;:)")))
    for module in sorted((ROOT / "longstraw_core" / "cli" / "commands").glob("*.py")):
        for match in re.finditer(r"Examples?: (.+?)\"", module.read_text(encoding="utf-8")):
            for part in match[1].split("|"):
                if part.strip().startswith("longstraw ") and "{" not in part:
                    found.append((str(module.relative_to(ROOT)), part.strip().removeprefix("longstraw ")))
    return found


def walk_to_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words lead to, and what is left of them."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("page", "text"), sorted(set(documented_commands())))
def test_every_documented_command_and_option_exists(page: str, text: str) -> None:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)]
    command, rest = walk_to_command([word for word in words if word])
    assert command is not main, f"{page}: longstraw {text}"
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    used = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    assert set(used) <= known, f"{page}: longstraw {text}: {sorted(set(used) - known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_every_named_make_target_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, re.MULTILINE):
        assert target in targets, target
    for script in re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", text):
        assert (ROOT / script).exists(), script


def test_a_page_speaks_of_no_place_that_only_its_authors_have() -> None:
    for page in PAGES:
        assert not re.search(r"/(?:work|root|home)/", page.read_text(encoding="utf-8")), page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"

"""The image lock: which image, by digest, each role of the pipeline runs in. No I/O here."""

import json
import re
from typing import Any, Literal, cast, get_args

from longstraw_core.spec.errors import SpecError

ImageRole = Literal["control", "trainer", "sampler"]
ROLES: tuple[ImageRole, ...] = get_args(ImageRole)

_HOST = r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?(?::[0-9]{1,5})?"
_PATH = r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)+"
_REPOSITORY = re.compile(_HOST + _PATH)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def image_problem(reference: str) -> str | None:
    """Say what keeps `reference` from being `registry/repository@sha256:<64 hex digits>`; None when nothing does."""
    repository, at, digest = reference.partition("@")
    if not at:
        last = repository.rpartition("/")[2]
        return "names a tag, which can move" if ":" in last else "has no digest"
    if _DIGEST.fullmatch(digest) is None:
        algorithm, _, digits = digest.partition(":")
        if algorithm == "sha256" and re.fullmatch(r"[0-9a-f]*", digits):
            return f"has a digest of {len(digits)} hex digits, sha256 has 64"
        return f"has the digest {digest!r}; sha256: and 64 lower-case hex digits are needed"
    if ":" in repository.rpartition("/")[2]:
        return "names a tag besides the digest; leave the tag out"
    if _REPOSITORY.fullmatch(repository) is None:
        return "is not registry/repository@sha256:…"
    return None


def how_to_get_a_digest(reference: str) -> str:
    """One sentence: the command that prints the digest of what `reference` names."""
    repository, _, _ = reference.partition("@")
    return (
        f"`skopeo inspect --format '{{{{.Digest}}}}' docker://{repository}` prints the digest; "
        "write repository@sha256:<64 hex digits>"
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def parse_image_lock(text: str, source: str) -> dict[str, str]:
    """Return name → `registry/repository@sha256:…` of a lock file's text.

    Raises:
        SpecError: not a JSON object of texts, a name twice, or a reference that is not pinned by digest; one line
            per fault, with the way to get a digest.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"{source}: {twice[0]!r} is there twice")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise SpecError(f"{source}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{source}: must be one object, name → repository@sha256:…, not {_kind(value)}")
    problems: list[str] = []
    lock: dict[str, str] = {}
    for name, reference in cast("dict[str, Any]", value).items():
        if not isinstance(reference, str):
            problems.append(f"{source}: {name}: must be a text, not {_kind(reference)}")
        elif (problem := image_problem(reference)) is not None:
            problems.append(f"{source}: {name}: {reference!r} {problem}; {how_to_get_a_digest(reference)}")
        else:
            lock[name] = reference
    if problems:
        raise SpecError("\n".join(problems))
    return lock


def require_roles(lock: dict[str, str], source: str) -> None:
    """Raise SpecError when a role of the pipeline has no image in a lock."""
    missing = [role for role in ROLES if role not in lock]
    if missing:
        raise SpecError(f"{source}: no image for {', '.join(missing)}; the pipeline needs {', '.join(ROLES)}")

"""Reads a specification file for the command line: overrides, and paths made absolute."""

from collections.abc import Sequence
from pathlib import Path

from longstraw_core.artifacts.store import path_of_file_uri
from longstraw_core.spec import SpecError, TransactionSpec
from longstraw_core.spec.parse import parse_transaction_spec


def read_spec(path: Path, overrides: Sequence[str] = ()) -> TransactionSpec:
    """Read and validate a specification file as it is written; `overrides` are `field.path=value` texts.

    Raises:
        SpecError: the file cannot be read, or any field or override is wrong.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from error
    return parse_transaction_spec(content, str(path), overrides=overrides)


def default_workdir(spec: TransactionSpec) -> Path:
    """Where a run of this specification is kept when nobody says otherwise, below the current directory."""
    return Path("runs") / f"{spec.name}-seed{spec.seed}"


def resolve_paths(spec: TransactionSpec, base: Path, *, store: Path | None = None) -> TransactionSpec:
    """Return the specification with every path absolute; relative ones start at `base` (the file's directory).

    Args:
        spec: The specification as written.
        base: Directory that relative paths start at.
        store: Where the artifact store is instead of `storage.uri`.
    """
    here = base.resolve()
    if store is not None:
        uri = store.resolve().as_uri()
    elif spec.storage.uri.startswith("file://"):
        uri = path_of_file_uri(spec.storage.uri, base=here).as_uri()
    else:
        uri = spec.storage.uri
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"snapshot": str((here / spec.model.snapshot).resolve())}),
            "data": spec.data.model_copy(update={"path": str((here / spec.data.path).resolve())}),
            "storage": spec.storage.model_copy(update={"uri": uri}),
        }
    )

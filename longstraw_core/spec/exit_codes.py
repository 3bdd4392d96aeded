"""The one place where error types become exit codes; documented in docs/operations.md."""

from longstraw_core.spec.errors import (
    DataRefused,
    IncompleteRun,
    IntegrityError,
    LongStrawError,
    NumericError,
    Retryable,
    SpecError,
    StageFailed,
)

DONE = 0
USAGE = 2
STAGE_FAILED = 3
DATA_REFUSED = 10
INTEGRITY = 11
NUMERIC = 12
INCOMPLETE = 13
RETRYABLE = 75
INTERRUPTED = 130
TERMINATED = 143
"""A launcher that was told to end: 128 + SIGTERM."""

EXIT_CODES: dict[type[LongStrawError], int] = {
    SpecError: USAGE,
    StageFailed: STAGE_FAILED,
    DataRefused: DATA_REFUSED,
    IntegrityError: INTEGRITY,
    NumericError: NUMERIC,
    IncompleteRun: INCOMPLETE,
    Retryable: RETRYABLE,
}

_BY_NAME: dict[str, type[LongStrawError]] = {error.__name__: error for error in EXIT_CODES}


def exit_code(error: BaseException) -> int:
    """Exit code of an error; anything that is not one of ours counts as a failed stage."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    for kind in type(error).__mro__:
        if kind in EXIT_CODES:
            return EXIT_CODES[kind]
    return STAGE_FAILED


def error_name(error: LongStrawError) -> str:
    """Name of the error's type as `error_from_name` knows it; a subclass counts as what it derives from."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind in EXIT_CODES), StageFailed.__name__)


def error_from_name(name: str, message: str) -> LongStrawError:
    """Rebuild an error that a stage reported in another process; unknown names become StageFailed."""
    return _BY_NAME.get(name, StageFailed)(message)

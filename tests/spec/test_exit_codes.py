"""Every error type has the documented exit code, and the documentation says the same."""

import re
from pathlib import Path

import pytest

from longstraw_core.spec import (
    DataRefused,
    IncompleteRun,
    IntegrityError,
    LongStrawError,
    NumericError,
    Retryable,
    SpecError,
    StageFailed,
)
from longstraw_core.spec.exit_codes import TERMINATED, error_from_name, exit_code

DOCUMENTED: dict[type[BaseException], int] = {
    SpecError: 2,
    StageFailed: 3,
    DataRefused: 10,
    IntegrityError: 11,
    NumericError: 12,
    IncompleteRun: 13,
    Retryable: 75,
    KeyboardInterrupt: 130,
}


@pytest.mark.parametrize(("kind", "code"), DOCUMENTED.items())
def test_each_error_has_its_documented_code(kind: type[BaseException], code: int) -> None:
    assert exit_code(kind("what happened")) == code


def test_subclasses_share_the_code_and_unknown_errors_count_as_a_failed_stage() -> None:
    class Narrow(IntegrityError):
        pass

    assert exit_code(Narrow("x")) == 11
    assert exit_code(RuntimeError("x")) == 3


def test_an_error_reported_by_another_process_keeps_its_code() -> None:
    for kind in LongStrawError.__subclasses__():
        assert type(error_from_name(kind.__name__, "x")) is kind
    assert type(error_from_name("Unheard", "x")) is StageFailed


def test_the_operations_page_lists_exactly_these_codes() -> None:
    page = Path(__file__).parents[2] / "docs" / "operations.md"
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)}
    assert listed == {0, TERMINATED, *DOCUMENTED.values()}

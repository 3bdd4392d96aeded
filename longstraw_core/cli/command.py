"""What every command shares: the output option, and errors as one line and one exit code."""

import functools
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec

import click

from longstraw_core.artifacts.files import storage_error
from longstraw_core.cli.output import OutputFormat, print_json, printable
from longstraw_core.spec import LongStrawError, StageFailed
from longstraw_core.spec.exit_codes import INTERRUPTED, exit_code
from longstraw_core.stages.execute import QUIET_AND_OFFLINE

Parameters = ParamSpec("Parameters")


class FiniteRange(click.FloatRange):
    """A number in a range; `nan`, which compares with nothing, and `inf` are no numbers here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def output_option(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Add `-o/--output table|json`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="For people, or one JSON object per line and nothing else on standard output.",
    )(function)


def reports_errors(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Turn our errors into a message on standard error (and a JSON object with `-o json`) and their exit code."""

    @functools.wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        output: OutputFormat = "json" if kwargs.get("output") == "json" else "table"
        try:
            function(*args, **kwargs)
        except LongStrawError as error:
            fail(error, output)
        except KeyboardInterrupt as error:
            message = str(error) or "interrupted; run the same command again to continue"
            if output == "json":
                print_json(
                    {"event": "error", "error": "KeyboardInterrupt", "exit_code": INTERRUPTED, "message": message}
                )
            click.echo(f"longstraw: {message}", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output went away (`| head`): not an error of ours, and nothing more can be printed.
            sys.stderr.close()
            sys.exit(exit_code(BrokenPipeError()))
        except OSError as error:
            fail(storage_error(error, f"using {error.filename}" if error.filename else "the file system"), output)
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            fail(StageFailed(f"a fault of this program: {type(error).__name__}: {error}"), output)

    return wrapped


def quiet_libraries() -> None:
    """Set the libraries' own switches, as a stage does; call it before they are imported."""
    for name, value in QUIET_AND_OFFLINE.items():
        os.environ.setdefault(name, value)


def fail(error: LongStrawError, output: OutputFormat) -> None:
    """Print the error and exit with its code."""
    code = exit_code(error)
    if output == "json":
        print_json({"event": "error", "error": type(error).__name__, "exit_code": code, "message": str(error)})
    for line in str(error).splitlines():
        click.echo(f"longstraw: {printable(line)}", err=True)
    sys.exit(code)

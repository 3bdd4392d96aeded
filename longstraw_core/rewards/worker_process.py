"""The program of a killable worker: answers one JSON line per JSON line, and dies by itself when it takes too long.

    python -m longstraw_core.rewards.worker_process ALARM_SECONDS math|python [PACKAGE.MODULE:FUNCTION]

Standard output belongs to the protocol; whatever a library or a plug-in prints goes to standard error.
"""

import importlib
import json
import math
import numbers
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

MAX_MEMORY_BYTES = 4 * 2**30
"""Address space of a worker, so that one response cannot take the machine's memory."""

Task = Mapping[str, Any]


def main(arguments: list[str]) -> int:
    """Serve until standard input ends."""
    alarm_seconds = float(arguments[0])
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def reply(record: Mapping[str, Any]) -> None:
        replies.write(json.dumps(record).encode() + b"\n")
        replies.flush()

    try:
        answer = _math_task if arguments[1] == "math" else _plugin_task(arguments[2])
        if arguments[1] == "math":
            from longstraw_core.rewards.math_answers.symbolic import warm_up

            warm_up()
    except PluginRefused as error:
        reply({"refused": str(error)})
        return 0
    _limit_memory()
    reply({"ready": True})
    own_process = os.getpid()
    for line in requests:
        # The default action of the alarm ends the process: it needs neither the main thread nor our parent.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, alarm_seconds)
        record = answer(json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own_process:
            os._exit(0)  # a plug-in forked: only the process that was asked may answer
        reply(record)
    return 0


class PluginRefused(Exception):
    """The plug-in cannot be used at all; the message says why."""


def load_plugin(name: str) -> Callable[..., Any]:
    """Import `package.module:function`.

    Raises:
        PluginRefused: there is no such module or function, or importing it fails.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PluginRefused(f"no module named {error.name}; install the package or set PYTHONPATH") from error
    except Exception as error:
        raise PluginRefused(f"importing {module_name} raised {type(error).__name__}: {_one_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PluginRefused(f"{module_name} has no function {function_name}")
    return function


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _math_task(task: Task) -> Mapping[str, Any]:
    from longstraw_core.rewards.math_answers import symbolic
    from longstraw_core.rewards.math_answers.limits import OverLimit, Unreadable

    try:
        if "reads" in task:
            return {"reads": symbolic.library_reads(task["reads"])}
        outcome, rule = symbolic.compare_texts(task["truth"], task["answer"])
    except Unreadable:
        return {"outcome": None, "rule": "unreadable"}
    except OverLimit:
        return {"outcome": None, "rule": "over_limit"}
    except Exception as error:  # sympy and the LaTeX reader raise anything on odd input; it means: not decided
        return {"outcome": None, "rule": f"failed_{type(error).__name__}"}
    return {"outcome": outcome, "rule": rule}


def _plugin_task(name: str) -> Callable[[Task], Mapping[str, Any]]:
    function = load_plugin(name)

    def answer(task: Task) -> Mapping[str, Any]:
        try:
            return checked_result(function(**task))
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {_one_line(error)}"}

    return answer


def checked_result(result: Any) -> Mapping[str, Any]:
    """Return what a plug-in returned as a record.

    Raises:
        TypeError: it is neither a finite number nor a mapping of the contract.
    """
    fields = {"score": result} if not isinstance(result, Mapping) else dict(result)
    unknown = sorted(set(fields) - {"score", "correct", "extracted", "rule"})
    if unknown:
        raise TypeError(
            f"the plug-in returned the unknown key {unknown[0]!r}; allowed: score, correct, extracted, rule"
        )
    score = fields.get("score")
    # numbers.Real: numpy's and other libraries' numbers are as good as Python's
    if isinstance(score, bool) or not isinstance(score, numbers.Real) or not math.isfinite(score):
        raise TypeError(f"the plug-in returned the score {str(score)[:40]!r}; return a finite number")
    correct = fields.get("correct", float(score) > 0)
    texts = [fields.get("extracted"), fields.get("rule")]
    if not isinstance(correct, bool) or not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError("the plug-in's correct must be a boolean, extracted and rule must be text")
    return {"score": float(score), "correct": correct, "extracted": texts[0], "rule": texts[1]}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

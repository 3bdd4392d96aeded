"""Rewards of kind `python` for the tests."""

import fcntl
import os
import time
from pathlib import Path
from typing import Any


def shorter_is_better(response: str, ground_truth: str) -> float:
    """Score by length, and talk on standard output, which must not disturb anybody."""
    print("scoring", flush=True)
    return 1.0 / (1 + len(response) + len(ground_truth))


def contains(response: str, ground_truth: str) -> dict[str, Any]:
    """Return every part of the contract."""
    found = ground_truth in response
    return {"score": 2.0 if found else -2.0, "correct": found, "extracted": ground_truth, "rule": "contains"}


def moody(response: str, ground_truth: str) -> Any:
    """Do whatever the response asks for."""
    if response == "hang":
        time.sleep(600)
    if response == "die":
        os._exit(1)
    if response == "raise":
        raise RuntimeError("no\nthanks")
    return {"nan": float("nan"), "text": "1", "unknown": {"score": 1, "points": 3}, "none": None}.get(response, 1)


def forks(response: str, ground_truth: str) -> float:
    """Leave a child behind that returns later, with a score of its own."""
    if response == "fork":
        if os.fork() == 0:
            time.sleep(0.2)
            return 0.1
        return 0.5
    time.sleep(0.6)
    return -0.9


def leaves_a_child(response: str, ground_truth: str) -> float:
    """Leave a child behind that holds a lock on the file that the response names."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        with Path(response).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(tell, b"1")
            time.sleep(600)
    return float(os.read(ready, 1))


def numpy_number(response: str, ground_truth: str) -> Any:
    """Return a number of another library."""
    import numpy

    return numpy.float32(0.5)


not_a_function = 3

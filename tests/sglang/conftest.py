"""Tests with the real SGLang on the CPU: collected only where its interpreter is named (`make test-sglang`).

One server at a time: each module starts what it needs and ends it.
"""

import os
from collections.abc import Iterator

import pytest

from longstraw_core.rollout.server_process import PYTHON_VARIABLE
from tests.support.sglang.cpu import real_environment

if PYTHON_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def cpu_environment() -> Iterator[pytest.MonkeyPatch]:
    """The environment in which the real server runs on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        real_environment(patch, ranks=2)
        yield patch

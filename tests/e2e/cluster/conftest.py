"""A cluster with two teams, made once for the tests that need one; the other tests of this directory need none."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import make_row
from tests.e2e.cluster.driver import ClusterDriver
from tests.e2e.cluster.site import Site, cluster_site, require_helm
from tests.e2e.cluster.tools import SetupError, missing_tools

SWITCH = "LONGSTRAW_E2E_CLUSTER"
WITHOUT = "needs a cluster of its own: make e2e-kind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [
        item
        for item in items
        if "site" in getattr(item, "fixturenames", ()) and Path(__file__).parent in item.path.parents
    ]
    if not os.environ.get(SWITCH):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))
    elif mine:
        missing = missing_tools()
        if missing:
            raise pytest.UsageError(missing)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, untrained_snapshot: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("cluster")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(make_row(number)) + "\n" for number in range(4)), encoding="utf-8")
    try:
        require_helm()
        with cluster_site(directory, untrained_snapshot, rows) as made:
            yield made
    except SetupError as error:
        pytest.exit(f"ERROR: {error}", returncode=2)


@pytest.fixture
def driver(site: Site, tmp_path: Path) -> ClusterDriver:
    return ClusterDriver(site.teams["search"], site.lock, tmp_path)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH, for stand-ins of command-line tools."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory

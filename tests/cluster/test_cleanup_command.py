"""`longstraw cleanup` from outside of the cluster, through a kubeconfig."""

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from longstraw_core.artifacts import FileStore
from longstraw_core.cli.main import main
from longstraw_core.cluster.placement import PlacementPlan
from tests.cluster.test_restarts import died_while_creating
from tests.servers.kubernetes_api.cluster import Cluster
from tests.servers.kubernetes_api.kubelet import eventually

Plan = Callable[..., PlacementPlan]


def cleanup(cluster: Cluster, store: FileStore, tmp_path: Path, *arguments: str) -> Result:
    kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
    return CliRunner().invoke(
        main, ["cleanup", "demo", "--store", store.uri, "--kubeconfig", str(kubeconfig), *arguments]
    )


def test_a_dry_run_shows_and_a_run_deletes_the_same(
    cluster: Cluster, make_test_plan: Plan, store: FileStore, tmp_path: Path
) -> None:
    plan = make_test_plan(namespace=cluster.namespace)
    died_while_creating(cluster, store, plan)
    dry = cleanup(cluster, store, tmp_path, "--dry-run", "-o", "json")
    assert dry.exit_code == 0, dry.output
    would = json.loads(dry.stdout)
    assert [item["kind"] for item in would["removed"]] == ["Job", "Service"]
    assert len(cluster.jobs()) == 1

    table = cleanup(cluster, store, tmp_path)
    assert table.exit_code == 0, table.output
    assert plan.name in table.stdout
    assert "deleted 2 objects" in table.stdout
    eventually(lambda: cluster.held() == [], "everything is deleted")
    again = json.loads(cleanup(cluster, store, tmp_path, "-o", "json").stdout)
    assert (again["removed"], again["closed"]) == ([], 1)


def test_a_living_launcher_is_left_alone_unless_asked(
    cluster: Cluster, make_test_plan: Plan, store: FileStore, tmp_path: Path
) -> None:
    died_while_creating(cluster, store, make_test_plan(namespace=cluster.namespace))
    cluster.kubelet.set_phase("launcher", "Running")
    kept = cleanup(cluster, store, tmp_path)
    assert "left alone: train of transaction 1" in kept.stdout
    assert len(cluster.jobs()) == 1
    assert "deleted 2 objects" in cleanup(cluster, store, tmp_path, "--even-running").stdout


def test_an_unknown_run_is_a_usage_error(cluster: Cluster, store: FileStore, tmp_path: Path) -> None:
    result = cleanup(cluster, store, tmp_path, "-o", "json")
    assert result.exit_code == 2
    assert "no journal of run 'demo'" in result.output


def test_without_a_cluster_it_says_so(store: FileStore, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["cleanup", "demo", "--store", store.uri, "--kubeconfig", str(tmp_path / "missing")]
    )
    assert result.exit_code == 2
    assert "KUBECONFIG" in result.output

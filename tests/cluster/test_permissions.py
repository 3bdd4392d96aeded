"""The list of rights is exactly what is used: the fake refuses more, and nothing in it is unused."""

from collections.abc import Callable

import pytest

from longstraw_core.artifacts import FileStore
from longstraw_core.cluster.api import ClusterApi
from longstraw_core.cluster.permissions import PERMISSIONS, role_rules
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.spec import Retryable, SpecError
from tests.cluster.conftest import launch_in_thread
from tests.cluster.test_launch import finish_all
from tests.cluster.test_restarts import died_while_creating
from tests.servers.kubernetes_api.cluster import Cluster

Plan = Callable[..., PlacementPlan]


def test_every_right_in_the_list_is_used_and_no_other(fake: Cluster, make_test_plan: Plan, store: FileStore) -> None:
    fake.kubelet.add_nodes(2)
    plan = make_test_plan()
    died_while_creating(fake, store, plan, pod="first")  # adoption
    died_while_creating(fake, store, make_test_plan(stage="sample"), pod="other")  # the reaper
    launched = launch_in_thread(fake, store, plan)
    finish_all(fake, plan.name)
    assert launched.wait() is None
    fake.create_quota(pods=0)
    refused = launch_in_thread_after_quota(fake, store, make_test_plan(stage="old_logprobs", scheduling_seconds=1))
    assert isinstance(refused, Retryable)
    assert fake.fake is not None
    assert fake.fake.used == {(item.group, item.resource, item.verb) for item in PERMISSIONS}


def launch_in_thread_after_quota(fake: Cluster, store: FileStore, plan: PlacementPlan) -> BaseException | None:
    return launch_in_thread(fake, store, plan, pod="third").wait()


def test_without_the_optional_rights_only_the_message_is_shorter(
    fake: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    assert fake.fake is not None
    optional = {(item.group, item.resource) for item in PERMISSIONS if item.optional}
    fake.fake.rules = [rule for rule in role_rules() if (rule["apiGroups"][0], rule["resources"][0]) not in optional]
    fake.create_quota(pods=0)
    error = launch_in_thread(fake, store, make_test_plan(scheduling_seconds=1)).wait()
    assert isinstance(error, Retryable)
    assert "were not created" in str(error)


@pytest.mark.parametrize("missing", [item for item in PERMISSIONS if not item.optional], ids=str)
def test_a_missing_right_is_named_by_the_server_and_leaves_nothing(
    missing: object, fake: Cluster, make_test_plan: Plan, store: FileStore
) -> None:
    assert fake.fake is not None
    fake.fake.rules = [
        {"apiGroups": [item.group], "resources": [item.resource], "verbs": [item.verb]}
        for item in PERMISSIONS
        if item != missing
    ]
    api: ClusterApi = fake.api()
    verb, resource = missing.verb, missing.resource  # type: ignore[attr-defined]
    plan = make_test_plan()
    calls = {
        ("create", "jobs"): lambda: api.create("Job", {"metadata": {"name": "x"}}),
        ("create", "services"): lambda: api.create("Service", {"metadata": {"name": "x"}}),
        ("get", "jobs"): lambda: api.get("Job", "x"),
        ("get", "services"): lambda: api.get("Service", "x"),
        ("get", "pods"): lambda: api.get("Pod", "x"),
        ("list", "jobs"): lambda: api.list_all("jobs", "metadata.name=x"),
        ("list", "pods"): lambda: api.list_all("pods", "a=b"),
        ("watch", "jobs"): lambda: api.watch("jobs", "metadata.name=x", "100"),
        ("watch", "pods"): lambda: api.watch("pods", "a=b", "100"),
        ("delete", "jobs"): lambda: api.delete("Job", "x", "u"),
        ("delete", "services"): lambda: api.delete("Service", "x", "u"),
        ("patch", "jobs"): lambda: api.set_owners("Job", _found("x"), [], {}),
        ("patch", "services"): lambda: api.set_owners("Service", _found("x"), [], {}),
        ("get", "pods/log"): lambda: list(api.follow_log("x", "worker", None)),
    }
    with pytest.raises(SpecError, match=f"cannot {verb} resource") as raised:
        calls[verb, resource]()
    assert "longstraw doctor" in str(raised.value)
    assert plan.name not in str(fake.held())


def _found(name: str) -> dict:
    return {"metadata": {"name": name, "uid": "u", "resourceVersion": "1"}}

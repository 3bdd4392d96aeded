"""The placement plan and the objects made from it: pure, deterministic, valid from Kubernetes 1.31 to 1.37."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kfp import dsl

from longstraw_core.cluster.manifests import Owner, job_manifest, service_manifest
from longstraw_core.cluster.names import label_value, object_name
from longstraw_core.cluster.placement import PlacementPlan, make_plan
from longstraw_core.cluster.task_config import PodSettings, accelerators, pod_settings
from longstraw_core.spec import SpecError, canonical_json
from tests.cluster.conftest import DIGEST, IMAGE
from tests.servers.kubernetes_api.validation import check_metadata, check_spec

Plan = Callable[..., PlacementPlan]
VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
FULL = PodSettings(
    resources={
        "limits": {"nvidia.com/gpu": "8", "rdma/hca": "8"},
        "requests": {"nvidia.com/gpu": "8", "rdma/hca": "8"},
    },
    node_selector={"gpu": "h200"},
    tolerations=({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},),
    affinity={
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            }
        }
    },
    env=(
        {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "store", "key": "id", "optional": True}}},
    ),
    volumes=(
        {"name": "model", "persistentVolumeClaim": {"claimName": "model"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ),
    volume_mounts=({"name": "model", "mountPath": "/models"}, {"name": "data", "mountPath": "/"}),
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "placement",
    [{}, {"queue": "gpu", "rdma": True, "pull_secrets": ("registry",)}, {"run_as_user": None, "run_as_group": None}],
    ids=["plain", "everything", "assigned user"],
)
def test_the_objects_are_valid(version: str, placement: dict[str, Any], make_test_plan: Plan) -> None:
    plan = make_test_plan(nodes=4, pod=FULL, **placement)
    owner = Owner("launcher", "8f0b6c3e-0000-4000-8000-000000000000")
    for manifest in (
        service_manifest(plan, intent="0" * 32, owner=owner),
        job_manifest(plan, intent="0" * 32, owner=owner),
    ):
        assert kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True) == version
        check_metadata(manifest["kind"], manifest)
        check_spec(manifest)


def test_the_validator_would_notice(make_test_plan: Plan) -> None:
    manifest = job_manifest(make_test_plan(pod=FULL), intent="0" * 32, owner=None)
    manifest["spec"]["template"]["spec"]["containers"][0]["securityContest"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_the_job_is_all_or_nothing_and_ends(make_test_plan: Plan) -> None:
    plan = make_test_plan(nodes=4, pod=FULL, deadline_seconds=7200)
    spec = job_manifest(plan, intent="0" * 32, owner=None)["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (0, 7200, 3600)
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    pod = spec["template"]["spec"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["affinity"]["nodeAffinity"] == FULL.affinity["nodeAffinity"]
    (container,) = pod["containers"]
    assert container["image"] == IMAGE
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    memory = {volume["name"]: volume for volume in pod["volumes"]}["shared-memory"]["emptyDir"]
    assert memory == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]  # noqa: S108
    assert "queue-name" not in json.dumps(spec)


def test_rdma_adds_the_capability_and_nothing_else(make_test_plan: Plan) -> None:
    plain, rdma = (
        job_manifest(make_test_plan(pod=FULL, rdma=value), intent="0" * 32, owner=None) for value in (False, True)
    )
    context = rdma["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    del context["capabilities"]["add"]
    rdma["metadata"]["annotations"] = plain["metadata"]["annotations"]
    assert rdma == plain


def test_every_process_can_know_its_place(make_test_plan: Plan) -> None:
    plan = make_test_plan(nodes=4)
    job = job_manifest(plan, intent="0" * 32, owner=None)
    variables = {item["name"]: item for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    service = service_manifest(plan, intent="0" * 32, owner=None)
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"]["value"] == host
    assert variables["LONGSTRAW_RENDEZVOUS"]["value"] == f"{host}:29500"
    assert (variables["NNODES"]["value"], variables["NPROC_PER_NODE"]["value"]) == ("4", "8")
    for name in ("NODE_RANK", "LONGSTRAW_NODE_RANK"):
        assert "job-completion-index" in variables[name]["valueFrom"]["fieldRef"]["fieldPath"]
    assert json.loads(variables["LONGSTRAW_REQUEST"]["value"]) == plan.request.to_json_object()
    assert len(variables) == len(job["spec"]["template"]["spec"]["containers"][0]["env"])


def test_equal_arguments_give_equal_plans_in_another_process(make_test_plan: Plan) -> None:
    plan = make_test_plan(pod=FULL)
    again = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from longstraw_core.cluster.placement import PlacementPlan as P;"
            "p = P.model_validate_json(sys.stdin.read()); print(p.digest, p.name);"
            "assert not {'torch', 'kfp'} & set(sys.modules)",
        ],
        input=canonical_json(plan).decode(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.split() == [plan.digest, plan.name]


def test_the_name_depends_on_what_tells_stages_apart_and_on_nothing_else(make_test_plan: Plan) -> None:
    plan = make_test_plan()
    assert make_test_plan(nodes=3, rdma=True).name == plan.name
    others = {make_test_plan(spec=b"other").name, make_test_plan(stage="sample").name}
    assert plan.name not in others
    base = {"store": "s3://a/b", "run": "r", "transaction": 1, "stage": "train", "spec_digest": DIGEST}
    names = {object_name(**base)} | {
        object_name(**{**base, **change})  # type: ignore[arg-type]
        for change in (
            {"store": "s3://a/c"},
            {"run": "s"},
            {"transaction": 2},
            {"stage": "sample"},
            {"spec_digest": "x"},
        )
    }
    assert len(names) == 6
    assert max(len(object_name(**{**base, "stage": stage})) for stage in ("capture_prefix", "old_logprobs")) <= 31  # type: ignore[arg-type]


@given(st.text(min_size=1, max_size=200))
def test_any_run_name_becomes_a_label_value(text: str) -> None:
    import re

    value = label_value(text)
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": "registry.example/trainer:v1"}, "sha256:<64 hex digits>"),
        ({"image": "registry.example/trainer@sha256:" + "a" * 63}, "sha256:<64 hex digits>"),
        ({"stage": "score_rewards"}, "runs in one pod"),
        ({"store": "file:///elsewhere"}, "directory of one machine"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_created(
    change: dict[str, Any], says: str, make_test_plan: Plan
) -> None:
    plan = make_test_plan()
    arguments = {
        name: getattr(plan, name)
        for name in (
            "namespace",
            "store",
            "run",
            "transaction",
            "stage",
            "spec_digest",
            "image",
            "request",
            "placement",
            "pod",
        )
    }
    with pytest.raises(SpecError, match=says):
        make_plan(**{**arguments, **change})


@dataclass
class NoConfig:
    """What KFP's local runner passes."""


def test_what_a_person_set_on_the_task_reaches_the_pods() -> None:
    config = dsl.TaskConfig(
        resources={"limits": {"nvidia.com/gpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8"}},
        node_selector={"gpu": "h200"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        env=[
            {"name": "AWS_REGION", "value": "eu"},
            {"name": "LONGSTRAW_IMAGE", "value": IMAGE},
            {"name": "HOME", "value": "/scratch"},
        ],
        volumes=[
            {"name": "scratch", "emptyDir": {}},
            {"name": "model", "persistentVolumeClaim": {"claimName": "model"}},
        ],
        volume_mounts=[{"name": "scratch", "mountPath": "/scratch"}, {"name": "model", "mountPath": "/models"}],
    )
    settings = pod_settings(config)
    assert settings.resources["requests"] == {"nvidia.com/gpu": "8", "cpu": "8"}
    assert accelerators(settings, "nvidia.com/gpu") == 8
    assert [item["name"] for item in settings.env] == ["AWS_REGION", "HOME"]
    assert [item["name"] for item in settings.volumes] == ["model"]
    assert [item["mountPath"] for item in settings.volume_mounts] == ["/models"]


def test_an_empty_task_configuration_leaves_the_defaults() -> None:
    assert pod_settings(dsl.TaskConfig(), defaults=FULL).node_selector == {"gpu": "h200"}
    assert pod_settings(None) == PodSettings() == pod_settings(NoConfig())


def test_the_same_variable_twice_is_refused() -> None:
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    with pytest.raises(SpecError, match="A of the task is there twice"):
        pod_settings(dsl.TaskConfig(env=twice))


@pytest.mark.parametrize("nodes", [1, 2, 1024])
def test_the_plan_can_be_printed(nodes: int, make_test_plan: Plan) -> None:
    rows = dict(make_test_plan(nodes=nodes).rows())
    assert rows["processes"] == f"{nodes * 8} (8 per pod)"
    assert rows["image"] == IMAGE

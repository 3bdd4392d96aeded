"""The compiled pipeline: all stages, in order, nothing cached, nothing installed at run time."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.images import image_lock
from longstraw_core.cli.compile_pipeline import compile_pipeline
from longstraw_core.cluster.placement import Placement
from longstraw_core.spec import SpecError
from longstraw_core.spec.cluster import SHARED_MEMORY
from longstraw_core.spec.images import ROLES
from longstraw_core.spec.parse import parse_transaction_spec
from longstraw_core.stages.catalogue import CATALOGUE, stage_entry
from pipelines.planned_placement import planned_pod

ROOT = Path(__file__).parents[2]
SPEC = """\
name: demo
model: {snapshot: model, family: qwen3_5_text}
data: {path: rows.jsonl}
"""
PARAMETERS = {
    **dict.fromkeys(("spec", "run", "parent_checkpoint", "accelerator"), "STRING"),
    **dict.fromkeys(("store_secret", "store_config", "pull_secret", "control_cpu", "control_memory"), "STRING"),
    **{f"{role}_{what}": "STRING" for role in ("trainer", "sampler") for what in ("cpu", "memory", "accelerators")},
    "node_selector": "STRUCT",
    "tolerations": "LIST",
}
SOME_DEFAULTS = {
    "trainer_memory": "512Gi",
    "trainer_accelerators": "8",
    "trainer_cpu": "8",
    "sampler_accelerators": "1",
    "node_selector": {"pool": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "pull_secret": "my-registry",
}


def compiled(transactions: int = 2, extra: str = "") -> dict[str, Any]:
    content = compile_pipeline(parse_transaction_spec(SPEC + extra, "test"), transactions)
    return next(yaml.safe_load_all(content))


def documents(
    transactions: int, *, extra: str = "", lock: dict[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pipeline, and what its platform document says of every executor's pod."""
    content = compile_pipeline(parse_transaction_spec(SPEC + extra, "test"), transactions, lock)
    pipeline, platform = yaml.safe_load_all(content)
    return pipeline, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def tasks(pipeline: dict[str, Any]) -> dict[str, Any]:
    return pipeline["components"]["comp-transaction"]["dag"]["tasks"]


def test_every_stage_is_one_task_that_waits_for_the_stages_it_reads() -> None:
    found = tasks(compiled())
    assert set(found) == {name.replace("_", "-") for name in CATALOGUE}
    for entry in CATALOGUE.values():
        task = found[entry.name.replace("_", "-")]
        for upstream in entry.upstream:
            assert upstream.replace("_", "-") in task["dependentTasks"]
            artifact = task["inputs"]["artifacts"][f"{upstream}_receipt"]["taskOutputArtifact"]
            assert artifact["producerTask"] == upstream.replace("_", "-")


def test_capture_waits_for_sampling_only_when_gpus_are_exclusive() -> None:
    assert "sample" in tasks(compiled())["capture-prefix"]["dependentTasks"]
    shared = tasks(compiled(extra="schedule: {exclusive_gpus: false}\n"))
    assert "sample" not in shared["capture-prefix"]["dependentTasks"]


def test_a_transaction_starts_from_the_checkpoint_before_it() -> None:
    chained = compiled(3)["root"]["dag"]["tasks"]
    assert len(chained) == 3
    parent = chained["transaction-2"]["inputs"]["parameters"]["parent_checkpoint"]["taskOutputParameter"]
    assert parent["producerTask"] == "transaction"
    numbers = [task["inputs"]["parameters"]["transaction"]["runtimeValue"]["constant"] for task in chained.values()]
    assert sorted(numbers) == [1, 2, 3]


def test_nothing_is_cached_and_nothing_is_installed_at_run_time() -> None:
    pipeline = compiled()
    for task in tasks(pipeline).values():
        assert task["cachingOptions"] == {}
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert "pip install" not in " ".join(executor["container"]["command"])


def test_the_form_has_a_described_working_default_for_every_parameter() -> None:
    parameters = compiled()["root"]["inputDefinitions"]["parameters"]
    assert set(PARAMETERS) == set(parameters)
    for name, field in parameters.items():
        assert field["parameterType"] == PARAMETERS[name], name
        assert "defaultValue" in field, name
        assert len(field["description"]) > 20, name
        assert "\n" not in field["description"], name


def test_defaults_of_the_form_come_from_the_specification() -> None:
    extra = """\
cluster:
  trainer: {memory: 512Gi, accelerators: 8}
  node_selector: {pool: h200}
  tolerations: [{key: gpu, operator: Exists}]
  pull_secret: my-registry
"""
    parameters = compiled(extra=extra)["root"]["inputDefinitions"]["parameters"]
    assert {name: parameters[name]["defaultValue"] for name in SOME_DEFAULTS} == SOME_DEFAULTS


def test_run_time_parameters_reach_the_pods() -> None:
    pipeline, platform = documents(2)
    for suffix in ("", "-2"):
        train = pipeline["deploymentSpec"]["executors"][f"exec-train{suffix}"]["container"]["resources"]
        assert train["resourceCpuRequest"] == "{{$.inputs.parameters['pipelinechannel--trainer_cpu']}}"
        assert train["accelerator"] == {
            "resourceCount": "{{$.inputs.parameters['pipelinechannel--trainer_accelerators']}}",
            "resourceType": "{{$.inputs.parameters['pipelinechannel--accelerator']}}",
        }
        assert train["resourceMemoryLimit"] == train["resourceMemoryRequest"]
        pod = platform[f"exec-train{suffix}"]
        assert pod["nodeSelector"] == {"nodeSelectorJson": {"componentInputParameter": "node_selector"}}
        assert pod["tolerations"] == [{"tolerationJson": {"componentInputParameter": "tolerations"}}]
        assert pod["secretAsEnv"][0]["secretNameParameter"] == {"componentInputParameter": "store_secret"}
        assert pod["imagePullSecret"] == [{"secretNameParameter": {"componentInputParameter": "pull_secret"}}]
        audit = pipeline["deploymentSpec"]["executors"][f"exec-audit-data{suffix}"]["container"]["resources"]
        assert "accelerator" not in audit
        assert "nodeSelector" not in platform[f"exec-audit-data{suffix}"]


def test_every_pod_is_bounded_unprivileged_and_has_its_own_directories() -> None:
    pipeline, platform = documents(1, extra="cluster: {queue: team, volumes: [{claim: c, mount_path: /data}]}\n")
    executors = pipeline["deploymentSpec"]["executors"]
    assert len(executors) == len(CATALOGUE) == len(platform)
    for name, pod in platform.items():
        environment = {item["name"]: item["value"] for item in executors[name]["container"]["env"]}
        mounts = {mount["mountPath"]: mount for mount in pod["emptyDirMounts"]}
        assert environment["HOME"] in mounts
        assert all(environment[cache].startswith("/scratch") for cache in ("HF_HOME", "XDG_CACHE_HOME", "TMPDIR"))
        assert mounts[SHARED_MEMORY]["medium"] == "Memory"
        assert pod["securityContext"] == {"runAsUser": "1000", "runAsGroup": "1000", "runAsNonRoot": True}
        assert int(pod["activeDeadlineSeconds"]) >= 3600
        assert pod["podMetadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        assert pod["pvcMount"][0]["mountPath"] == "/data"
    for task in tasks(pipeline).values():
        assert task["retryPolicy"]["maxRetryCount"] == 2
        assert task["retryPolicy"]["backoffDuration"] == "30s"


def test_the_authority_of_the_store_reaches_every_pod_also_those_that_launchers_make() -> None:
    extra = """\
storage: {uri: s3://bucket/team}
layout: {context_parallel: 2}
sampling: {max_response_tokens: 8}
cluster:
  store_authority: {config_map: store-authority, key: authority.crt}
  volumes: [{claim: data, mount_path: /data}]
  stages: {train: {nodes: 2}}
"""
    pipeline, platform = documents(1, extra=extra)
    assert "exec-train-on-nodes" in platform
    for name, pod in platform.items():
        (volume,) = pod["configMapAsVolume"]
        assert (volume["configMapName"], volume["mountPath"]) == ("store-authority", "/etc/longstraw-certificates")
        variables = pipeline["deploymentSpec"]["executors"][name]["container"]["env"]
        assert {"name": "AWS_CA_BUNDLE", "value": "/etc/longstraw-certificates/authority.crt"} in variables
    planned = planned_pod("train", parse_transaction_spec(SPEC + extra, "test").cluster)
    assert {"name": "store-authority", "configMap": {"name": "store-authority"}} in planned.volumes
    assert {"name": "store-authority", "mountPath": "/etc/longstraw-certificates"} in planned.volume_mounts
    without, _ = documents(1)
    assert "AWS_CA_BUNDLE" not in str(without)


def test_one_stage_can_get_other_resources_than_its_role() -> None:
    pipeline, platform = documents(1, extra="cluster: {stages: {train: {cpu: '32', timeout_minutes: 5}}}\n")
    executors = pipeline["deploymentSpec"]["executors"]
    assert executors["exec-train"]["container"]["resources"]["resourceCpuRequest"] == "32"
    assert platform["exec-train"]["activeDeadlineSeconds"] == "300"
    assert "trainer_cpu" in executors["exec-capture-prefix"]["container"]["resources"]["resourceCpuRequest"]


def test_an_image_lock_decides_the_images_and_the_identity_that_receipts_record() -> None:
    lock = {role: f"registry.example/{role}@sha256:{str(number) * 64}" for number, role in enumerate(ROLES)}
    pipeline, _ = documents(1, lock=lock)
    for entry in CATALOGUE.values():
        container = pipeline["deploymentSpec"]["executors"][f"exec-{entry.name.replace('_', '-')}"]["container"]
        assert container["image"] == lock[entry.image]
        assert {"name": "LONGSTRAW_IMAGE", "value": lock[entry.image]} in container["env"]


def test_without_a_lock_no_image_can_be_pulled() -> None:
    for executor in compiled()["deploymentSpec"]["executors"].values():
        assert executor["container"]["image"].startswith("localhost/")


def test_the_committed_pipeline_is_what_its_specification_compiles_to() -> None:
    folder = ROOT / "pipelines"
    spec = parse_transaction_spec((folder / "default.spec.yaml").read_bytes(), "default.spec.yaml")
    lock = image_lock(folder / "example.images.lock.json")
    content = compile_pipeline(spec, spec.schedule.transactions, lock)
    assert content == (folder / "longstraw.yaml").read_bytes(), "stale: run `make pipeline` and commit the result"


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_component_is_a_shim_with_a_page(name: str) -> None:
    folder = ROOT / "components" / name
    tree = ast.parse((folder / "component.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert len(function.body) <= 3
    page = (folder / "README.md").read_text(encoding="utf-8")
    for output in stage_entry(name).outputs:
        assert f"`{output}`" in page


ON_NODES = """\
cluster:
  queue: gpu
  stages:
    train: {nodes: 4, rdma: true, timeout_minutes: 120, scheduling_minutes: 10}
"""


def test_a_stage_with_several_nodes_becomes_a_launcher_and_the_others_stay() -> None:
    folder = ROOT / "pipelines"
    lock = image_lock(folder / "example.images.lock.json")
    pipeline, pods = documents(1, extra=ON_NODES, lock=lock)
    found = tasks(pipeline)
    assert "train-on-nodes" in found
    assert "train" not in found
    assert found["manifest-checkpoint"]["inputs"]["artifacts"]["train_receipt"]["taskOutputArtifact"] == {
        "outputArtifactKey": "receipt",
        "producerTask": "train-on-nodes",
    }
    executor = pipeline["deploymentSpec"]["executors"]["exec-train-on-nodes"]["container"]
    variables = {item["name"]: item["value"] for item in executor["env"]}
    assert executor["image"] == variables["LONGSTRAW_IMAGE"] == lock["control"]
    assert variables["LONGSTRAW_WORKER_IMAGE"] == lock["trainer"]
    parameters = found["train-on-nodes"]["inputs"]["parameters"]
    placement = Placement.model_validate_json(parameters["placement"]["runtimeValue"]["constant"])
    assert (placement.nodes, placement.rdma, placement.queue) == (4, True, "gpu")
    assert (placement.deadline_seconds, placement.scheduling_seconds) == (7200, 600)
    assert int(pods["exec-train-on-nodes"]["activeDeadlineSeconds"]) > 7200 + 600
    assert "podMetadata" not in pods["exec-train-on-nodes"] or "kueue" not in str(pods["exec-train-on-nodes"])
    assert "kueue" in str(pods["exec-sample"])
    passed = pipeline["components"]["comp-train-on-nodes"]["taskConfigPassthroughs"]
    assert {"field": "RESOURCES"} in passed
    assert {"applyToTask": True, "field": "ENV"} in passed


def test_only_stages_that_hold_the_model_can_have_several_nodes() -> None:
    with pytest.raises(SpecError, match=r"score_rewards.*can have several"):
        compiled(extra="cluster: {stages: {score_rewards: {nodes: 2}}}\n")

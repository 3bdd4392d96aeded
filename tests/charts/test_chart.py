"""The chart, by the real Helm binary: what it renders, what it refuses, and that teams are kept apart."""

import ipaddress
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from longstraw_core.artifacts import open_store
from longstraw_core.cli.main import main
from longstraw_core.cluster.permissions import role_rules
from longstraw_core.spec import TransactionSpec
from longstraw_core.spec.cluster import ClusterSpec
from longstraw_core.spec.transaction import StorageSpec
from tests.charts.rendering import CHART, GOLDEN, VALUES, helm, objects, template
from tests.servers.seaweedfs import prefix_user, seaweedfs

MINIMAL, FULL = VALUES / "minimal.yaml", VALUES / "full.yaml"
KUBERNETES = ["1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
DIGEST = "sha256:" + "a" * 64
# names that YAML reads as numbers when nobody quotes them
DIGITS = (
    'team="123"',
    'store={"uri":"s3://longstraw/teams/123","secretName":"1e3","caBundle":{"configMapName":"0","key":"1.0"}}',
    'serviceAccount={"create":true,"name":"7","annotations":{"a.b/c":"true"}}',
    'imagePullSecrets=["10"]',
    'kfp.tokenAudience="a:"',
    'snapshotCache={"enabled":true,"size":5,"storageClassName":"2","accessMode":"ReadWriteOncePod"}',
    'networkPolicy.egressNamespaces=["3"]',
    'queue={"enabled":true,"clusterQueue":"4"}',
    "garbageCollection.enabled=true",
)
LONGEST = "t" * 40
EVERYTHING_FOR_THE_LONGEST_NAME = (
    f'team="{LONGEST}"',
    f'store.uri="s3://longstraw/teams/{LONGEST}"',
    f'transaction={{"name":"n","storage":{{"uri":"s3://longstraw/teams/{LONGEST}"}}}}',
    "recurring.enabled=true",
    'recurring.schedule="*/15 0-6,12 1,15 JAN-MAR mon-fri"',
    "recurring.timeoutSeconds=2592000",
    "garbageCollection.enabled=true",
    'garbageCollection.schedule="@daily"',
    "garbageCollection.keepRuns=1000000",
    "snapshotCache.enabled=true",
    "jobs.runAsUser=1000650000",
    'resourceQuota={"pods":50,"requests.nvidia.com/gpu":"8"}',
)

MATRIX = [
    (),
    ("registration.enabled=false",),
    ("networkPolicy.enabled=false",),
    ("garbageCollection.enabled=true",),
    ("snapshotCache.enabled=true", 'snapshotCache.accessMode="ReadWriteOnce"'),
    ("queue.enabled=true", 'queue.clusterQueue="gpus"'),
    ("serviceAccount.create=false", 'serviceAccount.name="existing"'),
    ('store.secretName=""', 'serviceAccount.annotations={"role":"arn"}'),
    ('kfp.tokenSecretName="token"',),
    ('transaction={"name":"n","storage":{"uri":"s3://longstraw/teams/search"}}', "recurring.enabled=true"),
    DIGITS,
    EVERYTHING_FOR_THE_LONGEST_NAME,
    ('networkPolicy.egress=[{"cidr":"0.0.0.0/0","ports":[443]},{"cidr":"::/0","ports":[443]}]',),
    ('jobs.resources={"requests":{"cpu":1,"memory":"1Gi"},"limits":{"cpu":1,"memory":"1Gi"}}',),
    ('store.endpoint="https://[fd00::1]:8333"',),
]

REFUSED = {
    "no team": ('team=""', "/team"),
    "team with a capital": ('team="Search"', "/team"),
    "team too long": (f'team="{"t" * 41}"', "/team"),
    "team ends in a hyphen": ('team="a-"', "/team"),
    "image by tag": ('images.trainer="registry.example/trainer:v1"', "/images/trainer"),
    "image by tag and digest": (f'images.trainer="registry.example/t:v1@{DIGEST}x"', "/images/trainer"),
    "digest of 63 digits": (f'images.control="registry.example/control@sha256:{"a" * 63}"', "/images/control"),
    "no image": ('images.sampler=""', "/images/sampler"),
    "an unknown image": (f'images.other="registry.example/o@{DIGEST}"', "other"),
    "store without a prefix": ('store.uri="s3://longstraw"', "/store/uri"),
    "store of another team": ('store.uri="s3://longstraw/teams/law"', "does not end in /search"),
    "store with a step up": ('store.uri="s3://longstraw/teams/law/../search"', "/store/uri"),
    "store with credentials": ('store.uri="s3://key:secret@longstraw/search"', "/store/uri"),
    "store on a file system": ('store.uri="file:///data/search"', "/store/uri"),
    "endpoint with credentials": ('store.endpoint="https://key:secret@s3.example"', "/store/endpoint"),
    "endpoint without a host": ('store.endpoint="https://..."', "/store/endpoint"),
    "endpoint with a port that is none": ('kfp.endpoint="http://pipelines:99999"', "/kfp/endpoint"),
    "endpoint without scheme": ('store.endpoint="s3.example:8333"', "/store/endpoint"),
    "path style true": ("store.pathStyle=true", "/store/pathStyle"),
    "no credentials at all": ('store.secretName=""', "store.secretName"),
    "inline credentials": ('store.secretKey="abc"', "secretKey"),
    "no kfp endpoint": ('kfp.endpoint=""', "/kfp/endpoint"),
    "no account": ("serviceAccount.create=false", "serviceAccount.name"),
    "experiment that is a secret": ('kfp.experiment="$(AWS_SECRET_ACCESS_KEY)"', "/kfp/experiment"),
    "experiment that is an option": ('kfp.experiment="--wait"', "/kfp/experiment"),
    "cron of letters": ('recurring.schedule="a b c d e"', "/recurring/schedule"),
    "cron without such an hour": ('recurring.schedule="0 24 * * *"', "/recurring/schedule"),
    "cron with a time zone": ('recurring.schedule="TZ=UTC 2 * * *"', "/recurring/schedule"),
    "bad cron": ('garbageCollection.schedule="daily"', "/garbageCollection/schedule"),
    "keep nothing": ("garbageCollection.keepRuns=0", "/garbageCollection/keepRuns"),
    "no grace": ("garbageCollection.graceHours=0", "/garbageCollection/graceHours"),
    "bad size": ('snapshotCache.size="2 TB"', "/snapshotCache/size"),
    "bad access mode": ('snapshotCache.accessMode="RWX"', "/snapshotCache/accessMode"),
    "no size": ('snapshotCache.size="0"', "/snapshotCache/size"),
    "bad cidr": ('networkPolicy.apiServer.cidrs=["everywhere"]', "/networkPolicy/apiServer/cidrs"),
    "no such address": ('networkPolicy.apiServer.cidrs=["10.0.0.256/32"]', "/networkPolicy/apiServer/cidrs"),
    "no such block": ('networkPolicy.egress=[{"cidr":"10.0.0.0/33","ports":[1]}]', "/networkPolicy/egress"),
    "half an address": ('networkPolicy.egress=[{"cidr":"1234/8","ports":[1]}]', "/networkPolicy/egress"),
    "metadata server": ('networkPolicy.egress=[{"cidr":"169.254.169.254/32","ports":[80]}]', "metadata server"),
    "no policy at all": ("networkPolicy=null", "networkPolicy"),
    "bad port": ("networkPolicy.apiServer.ports=[70000]", "/networkPolicy/apiServer/ports"),
    "root": ("jobs.runAsUser=0", "/jobs/runAsUser"),
    "quota as a number": ('resourceQuota={"pods":"many"}', "/resourceQuota"),
    "less than nothing": ('resourceQuota={"pods":-1}', "/resourceQuota"),
    "quota of no resource": ('resourceQuota={"a b":"1"}', "/resourceQuota"),
    "annotation with a line break": ('serviceAccount.annotations={"a\\nb":"c"}', "/serviceAccount/annotations"),
    "unknown toleration": ('jobs.tolerations=[{"taint":"x"}]', "/jobs/tolerations"),
    "queue without a cluster queue": ("queue.enabled=true", "/queue"),
    "recurring without a transaction": ("recurring.enabled=true", "recurring.enabled"),
    "transaction elsewhere": ('transaction={"storage":{"uri":"s3://other/search"}}', "transaction.storage.uri"),
    "a secret in the transaction": (
        'transaction={"storage":{"uri":"s3://longstraw/teams/search","secret_key":"x"}}',
        "/transaction/storage",
    ),
    "a secret beside the transaction": ('transaction={"AWS_SECRET_ACCESS_KEY":"x"}', "/transaction"),
    "an authority that is no label": ('store.caBundle.configMapName="a.b"', "/store/caBundle/configMapName"),
    "a transaction with another authority": (
        'transaction={"storage":{"uri":"s3://longstraw/teams/search"},'
        '"cluster":{"store_authority":{"config_map":"other"}}}',
        "transaction.cluster.store_authority",
    ),
    "unknown value": ("recuring.enabled=true", "recuring"),
    "negative timeout": ("registration.timeoutSeconds=-1", "/registration/timeoutSeconds"),
    "secret name with a slash": ('store.secretName="a/b"', "/store/secretName"),
}


def containers(rendered: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (pod spec, container) of every pod that the chart makes."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for entry in rendered:
        spec = entry.get("spec", {})
        if entry["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        pod = spec if entry["kind"] == "Pod" else spec.get("template", {}).get("spec")
        found += [(pod, container) for container in (pod or {}).get("containers", [])]
    return found


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=lambda path: path.stem)
def test_lint_finds_nothing(values: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=lambda path: path.stem)
def test_rendering_equals_the_golden_file(values: Path) -> None:
    expected = (GOLDEN / values.name).read_text(encoding="utf-8")
    assert template(values) == expected, "if this change is meant: python -m tests.charts.rendering"


@pytest.mark.parametrize("overrides", MATRIX, ids=lambda overrides: ",".join(overrides) or "minimal")
def test_every_combination_is_valid_for_the_newest_and_oldest_kubernetes(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(template(MINIMAL, *overrides), encoding="utf-8")
    validate(path, [KUBERNETES[0], KUBERNETES[-1]])


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=lambda path: path.stem)
def test_golden_files_are_valid_for_every_supported_kubernetes(values: Path) -> None:
    validate(GOLDEN / values.name, KUBERNETES)


def validate(path: Path, versions: list[str]) -> None:
    tool = Path(sys.executable).with_name("kubernetes-validate")
    selected = [part for version in versions for part in ("-k", version)]
    done = subprocess.run([str(tool), "--strict", *selected, str(path)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    # Kueue's own kind has no schema in Kubernetes; nothing else may go unchecked
    unchecked = [line for line in output.splitlines() if "Couldn't find schema" in line]
    assert all("LocalQueue" in line for line in unchecked), unchecked
    known = [entry for entry in objects(path.read_text(encoding="utf-8")) if entry["kind"] != "LocalQueue"]
    assert output.count(" passed for resource ") == len(known) * len(versions)


@pytest.mark.parametrize(("override", "named"), REFUSED.values(), ids=list(REFUSED))
def test_bad_values_are_refused_by_name(override: str, named: str) -> None:
    done = helm("template", "ls", str(CHART), "--values", str(MINIMAL), "--set-json", override)
    assert done.returncode != 0, f"accepted {override}"
    assert named in done.stderr


def test_the_schema_knows_the_fields_of_a_transaction() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]["transaction"]
    for part, spec in (
        (schema, TransactionSpec),
        (schema["properties"]["storage"], StorageSpec),
        (schema["properties"]["cluster"], ClusterSpec),
    ):
        assert list(part["properties"]) == list(spec.model_fields)
        assert part["additionalProperties"] is False


def test_names_that_look_like_numbers_stay_text() -> None:
    rendered = objects(template(MINIMAL, *DIGITS, release="5", namespace="6"))
    for entry in rendered:
        metadata = entry["metadata"]
        texts = [*metadata["labels"].values(), *metadata.get("annotations", {}).values(), metadata["name"]]
        assert all(isinstance(text, str) for text in texts), metadata
    (binding,) = [entry for entry in rendered if entry["kind"] == "RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "7", "namespace": "6"}]
    for pod, container in containers(rendered):
        assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("7", [{"name": "10"}])
        assert {"secretRef": {"name": "1e3"}} in container["envFrom"]


def test_the_longest_team_has_names_that_the_api_accepts_and_arguments_that_are_whole_numbers() -> None:
    rendered = objects(template(MINIMAL, *EVERYTHING_FOR_THE_LONGEST_NAME))
    for entry in rendered:
        # of a cron job's name the controller makes those of its jobs, by eleven more characters
        longest = {"CronJob": 52, "ConfigMap": 253}.get(entry["kind"], 63)
        assert len(entry["metadata"]["name"]) <= longest
    (arguments,) = [c["args"] for _, c in containers(rendered) if c["name"] == "garbage-collection"]
    assert arguments[arguments.index("--keep-runs") + 1] == "1000000"
    assert {pod["securityContext"]["runAsUser"] for pod, _ in containers(rendered)} == {1000650000}
    (recurring,) = [entry for entry in rendered if entry["metadata"]["name"] == "longstraw-recurring"]
    assert recurring["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 2592000


def blocks(*overrides: str) -> dict[str, list[str]]:
    """Return CIDR block → what is left out of it, over all rules."""
    policies = [entry["spec"] for entry in objects(template(MINIMAL, *overrides)) if entry["kind"] == "NetworkPolicy"]
    targets = [target for policy in policies for rule in policy.get("egress", []) for target in rule["to"]]
    return {t["ipBlock"]["cidr"]: t["ipBlock"].get("except", []) for t in targets if "ipBlock" in t}


def test_pods_reach_only_private_networks_unless_the_values_say_more() -> None:
    assert blocks() == {"10.0.0.0/8": [], "172.16.0.0/12": [], "192.168.0.0/16": []}
    assert all(ipaddress.ip_network(block).is_private for block in blocks())


def test_no_block_opens_a_metadata_server() -> None:
    addresses = ipaddress.ip_address("169.254.169.254"), ipaddress.ip_address("fd00:ec2::254")
    wide = ["0.0.0.0/0", "128.0.0.0/1", "169.0.0.0/8", "169.254.0.0/16", "169.254.169.254/31", "168.0.0.0/7"]
    wide += ["169.254.128.0/18", "::/0", "fc00::/7", "fd00::/8", "fd00:ec2::/32"]
    apart = ["169.254.20.10/32", "169.254.0.0/17", "170.0.0.0/8", "0.0.0.0/1", "10.0.0.1/32", "2001:db8::/32"]
    found = blocks("networkPolicy.egress=" + json.dumps([{"cidr": cidr, "ports": [80]} for cidr in wide + apart]))
    for cidr in wide + apart:
        network = ipaddress.ip_network(cidr)
        hidden = [ipaddress.ip_network(text) for text in found[cidr]]
        assert bool(hidden) == (cidr in wide), cidr
        for address in addresses:
            assert address not in network or any(address in part for part in hidden), cidr
        assert all(part.subnet_of(network) for part in hidden), "Kubernetes takes only a part of the block"


def test_what_a_failed_hook_leaves_goes_by_itself() -> None:
    (register,) = [entry for entry in objects(template(FULL)) if entry["kind"] == "Job"]
    assert register["spec"]["ttlSecondsAfterFinished"] == 86400


def test_values_without_anything_are_refused() -> None:
    assert helm("template", "ls", str(CHART)).returncode != 0


def test_every_container_is_pinned_non_root_and_without_privileges() -> None:
    for pod, container in containers(objects(template(FULL))):
        assert container["image"].partition("@")[2].startswith("sha256:")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert set(container["resources"]) == {"requests", "limits"}
    assert len(containers(objects(template(FULL)))) == 4


def test_no_object_holds_a_secret_and_the_role_reads_none() -> None:
    rendered = objects(template(FULL))
    assert not [entry for entry in rendered if entry["kind"] == "Secret"]
    (role,) = [entry for entry in rendered if entry["kind"] == "Role"]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        assert "secrets" not in rule["resources"]
    assert not [entry for entry in rendered if entry["kind"].startswith("Cluster")]


def test_the_role_is_exactly_what_launchers_and_cleanup_use() -> None:
    (role,) = [entry for entry in objects(template(MINIMAL)) if entry["kind"] == "Role"]
    assert role["rules"] == role_rules()


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=lambda path: path.stem)
def test_every_command_of_a_container_exists_with_these_options(values: Path) -> None:
    for _, container in containers(objects(template(values, "garbageCollection.enabled=true"))):
        assert container["command"] == ["longstraw"]
        command, options = main.commands[container["args"][0]], container["args"][1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= known


def test_the_authority_of_the_store_reaches_jobs_and_stages_alike() -> None:
    rendered = objects(template(FULL))
    (configuration,) = [
        entry["data"] for entry in rendered if entry["metadata"]["name"] == "longstraw-law-configuration"
    ]
    transaction = yaml.safe_load(configuration["transaction.yaml"])
    assert transaction["cluster"] == {"store_authority": {"config_map": "store-authority", "key": "authority.crt"}}
    (environment,) = [entry["data"] for entry in rendered if entry["metadata"]["name"] == "longstraw-law-environment"]
    for pod, container in containers(rendered):
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "store-certificate-authority"]
        assert environment["AWS_CA_BUNDLE"] == f"{mount['mountPath']}/ca.crt"
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
        assert volume["configMap"]["items"] == [{"key": "authority.crt", "path": "ca.crt"}]
    # saying the same once more is no contradiction; without a bundle there is no authority
    same = '{"config_map":"store-authority","key":"authority.crt"}'
    template(FULL, f"transaction.cluster.store_authority={same}")
    assert "store_authority" not in template(
        MINIMAL, 'transaction={"storage":{"uri":"s3://longstraw/teams/search"},"seed":1}'
    )


def test_garbage_collection_runs_as_the_chart_says_with_credentials_for_the_prefix_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = objects(template(MINIMAL, "garbageCollection.enabled=true"))
    ((_, container),) = [found for found in containers(rendered) if found[1]["name"] == "garbage-collection"]
    user = prefix_user("key-of-search", "s" * 40, bucket="longstraw", prefix="teams/search")
    with seaweedfs(tmp_path / "s3", [user]) as server:
        server.client().create_bucket(Bucket="longstraw")
        for name, value in {
            **server.environment(),
            "AWS_ACCESS_KEY_ID": "key-of-search",
            "AWS_SECRET_ACCESS_KEY": "s" * 40,
        }.items():
            monkeypatch.setenv(name, value)
        open_store("s3://longstraw/teams/search", create=True).put_blob(b"of no run", "text/plain")
        done = CliRunner().invoke(main, [*container["args"], "-o", "json"])
    assert done.exit_code == 0, done.output
    (report,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (report["young"], report["blobs"]) == (1, []), report


def test_the_doctor_asks_about_the_cluster_and_reads_the_transaction() -> None:
    for values, spec in ((MINIMAL, False), (FULL, True)):
        (arguments,) = [c["args"] for _, c in containers(objects(template(values))) if c["name"] == "doctor"]
        assert {"--kubernetes", "--check-images"} <= set(arguments)
        assert ("/etc/longstraw/transaction.yaml" in arguments) == spec


def test_two_teams_share_no_object_prefix_or_network() -> None:
    search = objects(template(MINIMAL, release="search", namespace="team-search"))
    law = objects(template(FULL, release="law", namespace="team-law"))
    # without a namespace of its own every object goes to the release's; none is cluster-wide
    assert not [entry for entry in (*search, *law) if "namespace" in entry["metadata"]]
    stores = [
        entry["data"]["LONGSTRAW_STORE"]
        for team in (search, law)
        for entry in team
        if entry["kind"] == "ConfigMap" and "LONGSTRAW_STORE" in entry["data"]
    ]
    assert stores == ["s3://longstraw/teams/search", "s3://longstraw/teams/law"]
    for team in (search, law):
        policies = [entry["spec"] for entry in team if entry["kind"] == "NetworkPolicy"]
        assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
        sources = [source for policy in policies for rule in policy.get("ingress", []) for source in rule["from"]]
        # a pod selector alone means this namespace alone
        assert sources == [{"podSelector": {}}]
        (binding,) = [entry for entry in team if entry["kind"] == "RoleBinding"]
        assert {subject["namespace"] for subject in binding["subjects"]} == {
            "team-search" if team is search else "team-law"
        }


def test_the_lock_in_the_cluster_is_the_lock_of_the_values() -> None:
    (configuration,) = [
        entry for entry in objects(template(FULL)) if entry["metadata"]["name"] == "longstraw-law-configuration"
    ]
    assert json.loads(configuration["data"]["images.lock.json"]) == yaml.safe_load(FULL.read_text())["images"]
    assert yaml.safe_load(configuration["data"]["transaction.yaml"])["name"] == "nightly"

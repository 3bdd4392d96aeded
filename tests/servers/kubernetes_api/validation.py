"""What the fake refuses: unknown fields and wrong types by the bundled schemas, and the rules that no schema holds.

At least as strict as the real server: a manifest that passes here but not there is a bug of this file.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import referencing

from tests.servers.kubernetes_api.answers import Refused, bad_request, invalid

JsonObject = dict[str, Any]
SCHEMA_VERSIONS = ("1.31", "1.37")
MAX_ANNOTATION_BYTES = 256 << 10
MAX_OBJECT_BYTES = 3 << 19
"""Of a request to etcd, by default: 1.5 MiB."""

ENUMERATIONS = {
    "completionMode": ("NonIndexed", "Indexed"),
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    "action": ("FailJob", "FailIndex", "Ignore", "Count"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "protocol": ("TCP", "UDP", "SCTP"),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "restartPolicy": ("Always", "OnFailure", "Never"),
}
"""Fields, wherever they are in a specification, whose values are not free."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
_QUALIFIED = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_FIELD_PATH = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIPs?|podIPs?)"
)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_SCALE = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": float(1024**power) for power, letter in enumerate("KMGTP", start=1)
}


def check_schema(body: JsonObject) -> None:
    """Refuse what the strict schemas of the oldest or the newest version refuse."""
    for version in SCHEMA_VERSIONS:
        for error in _validator(body["kind"], body["apiVersion"], version).iter_errors(body):
            place = ".".join(str(part) for part in error.path)
            raise bad_request(f"strict decoding error ({version}): {place}: {error.message[:300]}")


@cache
def _validator(kind: str, api_version: str, version: str) -> Any:
    directory = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    full = next(item for item in kubernetes_validate.utils.all_versions() if item.startswith(version + "."))
    folder = directory / f"v{full}-local-strict"
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = json.loads((folder / f"{kind.lower()}-{short}.json").read_text())
    definitions = referencing.Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    registry = definitions @ (referencing.Resource.from_contents(schema) @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def check_metadata(kind: str, body: JsonObject) -> None:
    """Names, labels, annotations and owner references."""
    metadata = body["metadata"]
    name = metadata.get("name")
    if not name:
        raise invalid(kind, "", "metadata.name: Required value: name or generateName is required")
    rule, limit = (_SERVICE_NAME, 63) if kind == "Service" else (_SUBDOMAIN, 253)
    if rule.fullmatch(name) is None or len(name) > limit:
        raise invalid(kind, name, f'metadata.name: Invalid value: "{name}"')
    for key, value in (metadata.get("labels") or {}).items():
        if _QUALIFIED.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
            raise invalid(kind, name, f'metadata.labels: Invalid value: "{key}: {value}"')
    for key in metadata.get("annotations") or {}:
        if _QUALIFIED.fullmatch(key.lower()) is None:
            raise invalid(kind, name, f'metadata.annotations: Invalid value: "{key}"')
    owners = metadata.get("ownerReferences") or []
    for owner in owners:
        if not all(owner.get(field) for field in ("apiVersion", "kind", "name", "uid")):
            raise invalid(kind, name, "metadata.ownerReferences: apiVersion, kind, name and uid are required")
    if sum(bool(owner.get("controller")) for owner in owners) > 1:
        raise invalid(kind, name, "metadata.ownerReferences: only one reference can have Controller set to true")


def is_label(key: str, value: str) -> bool:
    """Whether a key and its value can be a label's."""
    return _QUALIFIED.fullmatch(key) is not None and _LABEL_VALUE.fullmatch(value) is not None


def check_size(body: JsonObject) -> None:
    """Annotations, and what etcd takes in one request."""
    annotations = body["metadata"].get("annotations") or {}
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > MAX_ANNOTATION_BYTES:
        problem = f"metadata.annotations: Too long: may not be more than {MAX_ANNOTATION_BYTES} bytes"
        raise invalid(body["kind"], body["metadata"]["name"], problem)
    if len(json.dumps(body)) > MAX_OBJECT_BYTES:
        raise Refused(500, "", "etcdserver: request is too large")


def check_delete_options(options: JsonObject) -> None:
    """Fields of `DeleteOptions`, and the policies there are."""
    known = {"apiVersion", "kind", "dryRun", "gracePeriodSeconds", "preconditions", "propagationPolicy"}
    conditions = options.get("preconditions") or {}
    for unknown in (*(options.keys() - known), *(conditions.keys() - {"uid", "resourceVersion"})):
        raise bad_request(f"unable to decode DeleteOptions: unknown field {unknown}")
    if options.get("propagationPolicy") not in (None, "Foreground", "Background", "Orphan"):
        raise invalid("DeleteOptions", "", "propagationPolicy: Unsupported value")


def check_spec(body: JsonObject) -> None:
    """The rules of a Service's, Job's or Pod's specification."""
    kind, name = body["kind"], body["metadata"]["name"]
    _check_enumerations(kind, name, body.get("spec"))
    if kind == "Job":
        _check_job(name, body["spec"])
    elif kind == "Service":
        _check_service(name, body["spec"])
    elif kind == "Pod":
        _check_pod(kind, name, "spec", body["spec"])


def _check_enumerations(kind: str, name: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_enumerations(kind, name, item)
    elif isinstance(value, dict):
        for field, item in value.items():
            if field in ENUMERATIONS and isinstance(item, str) and item not in ENUMERATIONS[field]:
                raise invalid(kind, name, f'{field}: Unsupported value: "{item}"')
            if field not in ("labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests"):
                _check_enumerations(kind, name, item)


def _check_service(name: str, spec: JsonObject) -> None:
    ports = spec.get("ports") or []
    names = [port.get("name") for port in ports]
    if len(ports) > 1 and None in names:
        raise invalid("Service", name, "spec.ports: name is required where there are several")
    if len(set(names)) != len(names):
        raise invalid("Service", name, "spec.ports: duplicate name")
    for port in ports:
        if not 1 <= port["port"] <= 65535 or (port.get("name") and _LABEL.fullmatch(port["name"]) is None):
            raise invalid("Service", name, "spec.ports: invalid port")
    for key, value in (spec.get("selector") or {}).items():
        if _QUALIFIED.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
            raise invalid("Service", name, "spec.selector: invalid")


def _check_job(name: str, spec: JsonObject) -> None:
    def refuse(problem: str) -> None:
        raise invalid("Job", name, problem)

    for field in ("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if spec.get(field, 0) < 0:
            refuse(f"spec.{field}: must be greater than or equal to 0")
    if spec.get("selector") or spec.get("manualSelector"):
        refuse("spec.selector: this fake makes its own")
    if spec.get("completionMode") == "Indexed":
        if spec.get("completions") is None:
            refuse("spec.completions: Required value: when completion mode is Indexed")
        if spec.get("parallelism", 1) > 100000 or _LABEL.fullmatch(f"{name}-{spec['completions'] - 1}") is None:
            refuse("metadata.name: the pods' host names would not be valid")
    template = spec["template"]
    pod = template["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        refuse('spec.template.spec.restartPolicy: Unsupported value: supported values: "OnFailure", "Never"')
    rules = (spec.get("podFailurePolicy") or {}).get("rules")
    if rules is not None:
        if pod["restartPolicy"] != "Never":
            refuse("spec.template.spec.restartPolicy: must be Never when podFailurePolicy is specified")
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            refuse("spec.podReplacementPolicy: only Failed is allowed with podFailurePolicy")
        containers = {item["name"] for item in pod["containers"]} | {
            item["name"] for item in pod.get("initContainers", [])
        }
        for rule in rules:
            codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
            if bool(codes) == bool(conditions):
                refuse("spec.podFailurePolicy.rules: exactly one of onExitCodes and onPodConditions")
            if codes:
                values = codes["values"]
                if not values or sorted(set(values)) != values or len(values) > 255:
                    refuse("spec.podFailurePolicy.rules.onExitCodes.values: must be ordered, unique and not empty")
                if codes["operator"] == "In" and 0 in values:
                    refuse("spec.podFailurePolicy.rules.onExitCodes.values: must not be 0 for the In operator")
                if codes.get("containerName") and codes["containerName"] not in containers:
                    refuse("spec.podFailurePolicy.rules.onExitCodes.containerName: must be one of the containers")
            for condition in conditions or []:
                if condition.get("status") not in ("True", "False", "Unknown"):
                    refuse("spec.podFailurePolicy.rules.onPodConditions.status: Required value")
    check_metadata("Job", {"metadata": {**template.get("metadata", {}), "name": name}})
    _check_pod("Job", name, "spec.template.spec", pod)


def _check_pod(kind: str, name: str, place: str, pod: JsonObject) -> None:
    def refuse(problem: str) -> None:
        raise invalid(kind, name, f"{place}.{problem}")

    if not pod.get("containers"):
        refuse("containers: Required value")
    volumes = [volume["name"] for volume in pod.get("volumes") or []]
    if len(set(volumes)) != len(volumes):
        refuse("volumes: Duplicate value")
    for volume in pod.get("volumes") or []:
        if _LABEL.fullmatch(volume["name"]) is None or len(volume) != 2:
            refuse("volumes: a name and exactly one source")
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if limit is not None and _QUANTITY.fullmatch(str(limit)) is None:
            refuse(f'volumes.emptyDir.sizeLimit: Invalid value: "{limit}"')
        claim = volume.get("persistentVolumeClaim")
        if claim is not None and _SUBDOMAIN.fullmatch(claim["claimName"]) is None:
            refuse("volumes.persistentVolumeClaim.claimName: invalid")
    for secret in pod.get("imagePullSecrets") or []:
        if _SUBDOMAIN.fullmatch(secret.get("name") or "") is None:
            refuse("imagePullSecrets.name: invalid")
    for field in ("subdomain", "hostname"):
        if pod.get(field) and _LABEL.fullmatch(pod[field]) is None:
            refuse(f"{field}: invalid")
    if len({item["name"] for item in pod["containers"]}) != len(pod["containers"]):
        refuse("containers.name: Duplicate value")
    for container in pod["containers"]:
        if _LABEL.fullmatch(container["name"]) is None or not container.get("image"):
            refuse("containers: name and image are required")
        for variable in container.get("env") or []:
            if _VARIABLE.fullmatch(variable["name"]) is None:
                refuse("containers.env.name: invalid")
            if variable.get("value") and variable.get("valueFrom"):
                refuse("containers.env.valueFrom: may not be specified when value is not empty")
            path = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
            if path is not None and _FIELD_PATH.fullmatch(path) is None:
                refuse(f'containers.env.valueFrom.fieldRef.fieldPath: Invalid value: "{path}"')
        paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
        if len(set(paths)) != len(paths):
            refuse("containers.volumeMounts.mountPath: must be unique")
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                refuse(f'containers.volumeMounts.name: Not found: "{mount["name"]}"')
        _check_resources(refuse, container.get("resources") or {})
        names = [port.get("name") for port in container.get("ports") or [] if port.get("name")]
        if len(set(names)) != len(names) or any(len(item) > 15 for item in names):
            refuse("containers.ports.name: must be unique and no more than 15 characters")
    for key, value in (pod.get("nodeSelector") or {}).items():
        if _QUALIFIED.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
            refuse("nodeSelector: invalid")
    for toleration in pod.get("tolerations") or []:
        if toleration.get("operator", "Equal") not in ("Exists", "Equal"):
            refuse("tolerations.operator: Unsupported value")
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            refuse("tolerations.value: must be empty when operator is Exists")
        if not toleration.get("key") and toleration.get("operator") != "Exists":
            refuse("tolerations.operator: must be Exists when key is empty")
        if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
            refuse("tolerations.effect: must be NoExecute when tolerationSeconds is set")
    spread = ((pod.get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution", []
    )
    if any(not term.get("topologyKey") for term in spread):
        refuse("affinity.podAntiAffinity: topologyKey: Required value")


def _check_resources(refuse: Any, resources: JsonObject) -> None:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, value in (*limits.items(), *requests.items()):
        if _QUANTITY.fullmatch(str(value)) is None:
            refuse(f'containers.resources: Invalid value: "{value}"')
        if "/" not in name and name not in ("cpu", "memory", "ephemeral-storage"):
            refuse(f'containers.resources: Invalid value: "{name}"')
    for name, value in requests.items():
        if name in limits and amount(str(value)) > amount(str(limits[name])):
            refuse(f"containers.resources.requests: {name} must be less than or equal to its limit")
        if "/" in name and (name not in limits or amount(str(limits[name])) != amount(str(value))):
            refuse(f"containers.resources.limits: {name}: limit must be set and equal for non overcommitable resources")


def amount(text: str) -> float:
    """The number that a quantity means."""
    suffix = re.sub(r"[0-9.]", "", text)
    return float(text.removesuffix(suffix)) * _SCALE.get(suffix, 1.0)


IMMUTABLE_JOB_FIELDS = (
    "template",
    "completions",
    "completionMode",
    "selector",
    "podFailurePolicy",
    "backoffLimitPerIndex",
)


def check_update(old: JsonObject, new: JsonObject) -> None:
    """Fields that may not change after creation."""
    kind, name = old["kind"], old["metadata"]["name"]
    for field in ("name", "namespace", "uid", "creationTimestamp"):
        if old["metadata"].get(field) != new["metadata"].get(field):
            raise invalid(kind, name, f"metadata.{field}: Invalid value: field is immutable")
    if kind == "Job":
        for field in IMMUTABLE_JOB_FIELDS:
            if old["spec"].get(field) != new["spec"].get(field):
                raise invalid(kind, name, f"spec.{field}: Invalid value: field is immutable")
    if kind == "Service" and old["spec"].get("clusterIP") != new["spec"].get("clusterIP"):
        raise invalid(kind, name, "spec.clusterIP: Invalid value: may not change once set")

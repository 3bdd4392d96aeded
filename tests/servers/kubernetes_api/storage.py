"""The fake's state: objects with uid and resourceVersion, and the history that watches read."""

import copy
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.servers.kubernetes_api.answers import Refused, bad_request, conflict, not_found
from tests.servers.kubernetes_api.validation import (
    check_delete_options,
    check_metadata,
    check_schema,
    check_size,
    check_spec,
    check_update,
)

JsonObject = dict[str, Any]
Key = tuple[str, str, str]

KINDS = {
    "jobs": ("batch/v1", "Job"),
    "services": ("v1", "Service"),
    "pods": ("v1", "Pod"),
    "events": ("v1", "Event"),
    "resourcequotas": ("v1", "ResourceQuota"),
    "nodes": ("v1", "Node"),
}
PLURALS = {kind: plural for plural, (_, kind) in KINDS.items()}


@dataclass
class Storage:
    """Objects by plural, namespace and name. Every write is followed by the controllers, under one lock."""

    objects: dict[Key, JsonObject] = field(default_factory=dict)
    history: list[tuple[int, str, str, JsonObject]] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    namespaces: set[str] = field(default_factory=lambda: {"team"})
    offset: float = 0.0
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    controllers: list[Callable[["Storage"], bool]] = field(default_factory=list)
    reconciling: bool = False

    def now(self) -> float:
        return time.time() + self.offset

    def timestamp(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def pass_time(self, seconds: float) -> None:
        with self.changed:
            self.offset += seconds
            self.reconcile()

    def compact(self) -> None:
        """Forget all history: watches from an older version get 410."""
        with self.changed:
            self.version += 1
            self.oldest = self.version

    def all(self, plural: str, namespace: str | None = None) -> list[JsonObject]:
        return [
            item
            for (kind, place, _), item in sorted(self.objects.items())
            if kind == plural and namespace in (None, place)
        ]

    def get(self, plural: str, namespace: str, name: str) -> JsonObject:
        item = self.objects.get((plural, namespace, name))
        if item is None:
            raise not_found(plural, name)
        return item

    def create(self, plural: str, namespace: str, body: JsonObject) -> JsonObject:
        api_version, kind = KINDS[plural]
        if body.get("apiVersion") != api_version or body.get("kind") != kind:
            raise bad_request(f"the object provided is not a {api_version} {kind}")
        metadata = body.get("metadata")
        if not isinstance(metadata, dict):
            raise bad_request("metadata is required")
        if metadata.get("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        for owned in ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"):
            if metadata.get(owned):
                raise bad_request(f"metadata.{owned} should not be set on objects to be created")
        check_schema(body)
        body = _without_nulls(body)
        metadata = body["metadata"]
        check_metadata(kind, body)
        check_spec(body)
        check_size(body)
        with self.changed:
            name = metadata["name"]
            if plural != "nodes" and namespace not in self.namespaces:
                raise not_found("namespaces", namespace)
            if (plural, namespace, name) in self.objects:
                raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
            item = copy.deepcopy(body)
            item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.timestamp(), "generation": 1}
            if plural != "nodes":
                item["metadata"]["namespace"] = namespace
            item.setdefault("status", {})
            _default(item)
            self.objects[plural, namespace, name] = item
            self._record(plural, "ADDED", item)
            self.reconcile()
            return copy.deepcopy(self.objects.get((plural, namespace, name), item))

    def change(self, plural: str, item: JsonObject) -> None:
        """Record that `item`, which is in the storage, was changed in place."""
        self._record(plural, "MODIFIED", item)

    def patch(self, plural: str, namespace: str, name: str, body: JsonObject, subresource: str) -> JsonObject:
        with self.changed:
            old = self.get(plural, namespace, name)
            wanted = (body.get("metadata") or {}).get("resourceVersion")
            if wanted not in (None, old["metadata"]["resourceVersion"]):
                raise conflict(
                    plural, name, "the object has been modified; please apply your changes to the latest version"
                )
            if (body.get("metadata") or {}).get("uid") not in (None, old["metadata"]["uid"]):
                raise conflict(plural, name, "Precondition failed: UID in precondition does not match")
            new = merge(copy.deepcopy(old), body)
            if subresource == "status":
                new = {**old, "status": new.get("status", {})}
                check_schema(new)
            else:
                new["status"] = old.get("status", {})
                check_schema(new)
                check_update(old, new)
                check_metadata(new["kind"], new)
            check_size(new)
            if new == old:
                return copy.deepcopy(old)
            self.objects[plural, namespace, name] = new
            self._record(plural, "MODIFIED", new)
            self.reconcile()
            return copy.deepcopy(new)

    def delete(self, plural: str, namespace: str, name: str, options: JsonObject) -> JsonObject:
        check_delete_options(options)
        # a Job that is deleted without a word leaves its pods running: so it is in batch/v1
        policy = options.get("propagationPolicy") or ("Orphan" if plural == "jobs" else "Background")
        with self.changed:
            item = self.get(plural, namespace, name)
            wanted = options.get("preconditions") or {}
            for part in ("uid", "resourceVersion"):
                observed = item["metadata"][part]
                if wanted.get(part) not in (None, observed):
                    raise conflict(plural, name, f"Precondition failed: {part} {wanted[part]}, observed {observed}")
            if plural == "pods":
                self._delete_pod(item, options)
            elif policy == "Foreground":
                if not item["metadata"].get("deletionTimestamp"):
                    item["metadata"] |= {
                        "deletionTimestamp": self.timestamp(),
                        "deletionGracePeriodSeconds": 0,
                        "finalizers": [*item["metadata"].get("finalizers", []), "foregroundDeletion"],
                    }
                    self._record(plural, "MODIFIED", item)
            else:
                if policy == "Orphan":
                    self._orphan(item["metadata"]["uid"])
                self.remove(plural, item)
            self.reconcile()
            return copy.deepcopy(item)

    def _orphan(self, uid: str) -> None:
        """Nothing belongs to this object any more."""
        for (plural, _, _), item in self.objects.items():
            owners = item["metadata"].get("ownerReferences", [])
            kept = [owner for owner in owners if owner["uid"] != uid]
            if kept != owners:
                item["metadata"]["ownerReferences"] = kept
                self._record(plural, "MODIFIED", item)

    def _delete_pod(self, pod: JsonObject, options: JsonObject) -> None:
        bound = bool(pod["spec"].get("nodeName"))
        ended = pod["status"].get("phase") in ("Succeeded", "Failed")
        grace = options.get("gracePeriodSeconds")
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        if not bound or ended or grace == 0:
            self.remove("pods", pod)
        elif not pod["metadata"].get("deletionTimestamp"):
            pod["metadata"] |= {"deletionTimestamp": self.timestamp(), "deletionGracePeriodSeconds": grace}
            self._record("pods", "MODIFIED", pod)

    def remove(self, plural: str, item: JsonObject) -> None:
        self.objects.pop((plural, item["metadata"].get("namespace", ""), item["metadata"]["name"]))
        self._record(plural, "DELETED", item)

    def reconcile(self) -> None:
        """Let every controller act until none has anything to do."""
        if self.reconciling:
            return
        self.reconciling = True
        try:
            for _ in range(200):
                acted = [controller(self) for controller in self.controllers]
                if not any(acted):
                    return
            raise AssertionError("the fake's controllers do not settle")
        finally:
            self.reconciling = False

    def _record(self, plural: str, kind: str, item: JsonObject) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, plural, kind, copy.deepcopy(item)))
        self.changed.notify_all()


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def _without_nulls(value: Any) -> Any:
    """Null is the same as absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _default(item: JsonObject) -> None:
    if item["kind"] == "Job":
        uid, name = item["metadata"]["uid"], item["metadata"]["name"]
        spec = item["spec"]
        spec.setdefault("suspend", False)
        spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
        template = spec["template"].setdefault("metadata", {})
        template["labels"] = {
            **template.get("labels", {}),
            "batch.kubernetes.io/controller-uid": uid,
            "batch.kubernetes.io/job-name": name,
            "controller-uid": uid,
            "job-name": name,
        }
    elif item["kind"] == "Service":
        spec = item["spec"]
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        spec["clusterIPs"] = [spec["clusterIP"]] if spec.get("clusterIP") else ["10.0.0.1"]
    elif item["kind"] == "Pod":
        item["status"].setdefault("phase", "Pending")

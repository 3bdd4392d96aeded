"""Creates, adopts, replaces and deletes the objects of one stage; never touches an object that no journal names."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from longstraw_core.cluster.api import ClusterApi, Conflict, Exists, Missing
from longstraw_core.cluster.journal import (
    OBJECT_KINDS,
    Attempt,
    Closed,
    Deleted,
    ObjectKind,
    Owned,
    Released,
    attempts_of_stage,
    read_attempts,
)
from longstraw_core.cluster.manifests import Owner, job_manifest, service_manifest, stage_labels
from longstraw_core.cluster.names import INTENT_ANNOTATION, PLAN_ANNOTATION
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.spec import Retryable, SpecError

JsonObject = dict[str, Any]
Say = Callable[[str], None]

GONE_SECONDS = 120.0
"""Longest wait until a replaced Job and its pods are gone."""
_POLL_SECONDS = 0.5
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Removal:
    """One object that was deleted, or would be."""

    kind: ObjectKind
    namespace: str
    name: str
    uid: str
    attempt: int
    stage: str
    transaction: int


class Superseded(Retryable):
    """Another attempt owns the objects now."""


@dataclass
class Ownership:
    """What one attempt does with the objects of its plan."""

    api: ClusterApi
    plan: PlacementPlan
    attempt: Attempt
    earlier: list[Attempt]
    """Attempts of the same stage before this one."""
    owner: Owner | None
    say: Say
    gone_seconds: float = GONE_SECONDS
    objects: dict[ObjectKind, JsonObject] = field(default_factory=dict[ObjectKind, JsonObject])

    def establish(self) -> None:
        """Make the Service and the Job of the plan exist and be this attempt's.

        Raises:
            SpecError: an object of that name belongs to nobody in the journal, or the server refuses the plan.
            Retryable: the server does not answer, or what is to be replaced does not go away.
        """
        for kind in OBJECT_KINDS:
            self.objects[kind] = self._obtain(kind)
        self._tie_service_to_job()

    def give_back(self, *, within: float | None = None) -> list[Removal]:
        """Delete what this attempt owns, the Job first, and close the journal.

        Raises:
            Retryable: not everything could be deleted; the journal stays open for the next attempt or for `cleanup`.
        """
        return give_back(self.api, self.attempt, within=within, reason="given back by its launcher")

    def _obtain(self, kind: ObjectKind) -> JsonObject:
        for _ in range(_ATTEMPTS):
            intent = self.attempt.intent.token
            build = job_manifest if kind == "Job" else service_manifest
            try:
                made = self.api.create(kind, build(self.plan, intent=intent, owner=self.owner))
            except Exists:
                found = self.api.get(kind, self.plan.name)
                if found is None:
                    continue
                if not self._ours(found):
                    self._end_if_superseded(found)
                    raise SpecError(
                        f"{kind} {self.plan.namespace}/{self.plan.name} exists and no journal in {self.plan.store} "
                        "names it; delete it if nobody needs it, or run under another name"
                    ) from None
                taken = self._take_over(kind, found)
                if taken is None:
                    continue
                return taken
            self.attempt.append(Owned(object=kind, uid=made["metadata"]["uid"]))
            self.say(f"{kind} {self.plan.name} created")
            return made
        raise Retryable(f"{kind} {self.plan.name} keeps changing hands; run again")

    def _ours(self, found: JsonObject) -> bool:
        """Whether this attempt or an earlier one made or adopted it."""
        return any(_bears(found, attempt) for attempt in (self.attempt, *self.earlier))

    def _end_if_superseded(self, found: JsonObject) -> None:
        """Two launchers started at once, and the one with the higher number was quicker."""
        for attempt in attempts_of_stage(self.attempt.store, self.attempt.place):
            if attempt.place > self.attempt.place and _bears(found, attempt):
                raise Superseded(f"a later attempt of {self.plan.stage} has created the objects; this one ends")

    def _take_over(self, kind: ObjectKind, found: JsonObject) -> JsonObject | None:
        """Adopt an object of the same plan that is still good, else replace it; None: try to create again."""
        metadata = found["metadata"]
        if (metadata.get("annotations") or {}).get(INTENT_ANNOTATION) == self.attempt.intent.token:
            self.attempt.append(Owned(object=kind, uid=metadata["uid"]))  # only the answer to our request was lost
            return found
        same = (metadata.get("annotations") or {}).get(PLAN_ANNOTATION) == self.plan.digest
        if not same or metadata.get("deletionTimestamp") or _ended_badly(found):
            self._replace(kind, found, "its plan is another" if not same else "it has failed or is being deleted")
            return None
        # owned before it is released: whoever dies in between leaves one owner too many, never none
        if metadata["uid"] not in self.attempt.live:
            self.attempt.append(Owned(object=kind, uid=metadata["uid"], adopted=True))
        try:
            owners = [] if self.owner is None else [self.owner.reference()]
            adopted = self.api.set_owners(kind, found, owners, {})
        except (Conflict, Missing):
            return None  # its status moved on, or it was replaced or deleted: look again
        for attempt in self.earlier:
            made_here = (metadata.get("annotations") or {}).get(INTENT_ANNOTATION) == attempt.intent.token
            if metadata["uid"] in attempt.live or made_here:  # its uid is unknown there when that launcher died early
                attempt.append(Released(uid=metadata["uid"], attempt=self.attempt.place.attempt))
        self.say(f"{kind} {self.plan.name} of an earlier attempt adopted")
        return adopted

    def _replace(self, kind: ObjectKind, found: JsonObject, why: str) -> None:
        uid = found["metadata"]["uid"]
        self.say(f"{kind} {self.plan.name} of an earlier attempt is replaced: {why}")
        self.api.delete(kind, self.plan.name, uid)
        deadline = time.monotonic() + self.gone_seconds
        while True:
            current = self.api.get(kind, self.plan.name)
            if current is None or current["metadata"]["uid"] != uid:
                break
            if time.monotonic() > deadline:
                raise Retryable(
                    f"{kind} {self.plan.name} of an earlier attempt is still being deleted after "
                    f"{self.gone_seconds:.0f} s; its pods do not end: run again later"
                )
            time.sleep(_POLL_SECONDS)
        for attempt in self.earlier:
            if uid in attempt.live:
                attempt.append(Deleted(uid=uid))

    def _tie_service_to_job(self) -> None:
        """Make the Job the Service's owner, so that the Service goes with it, also when the Job's time is over."""
        service, job = self.objects["Service"], self.objects["Job"]
        reference = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": self.plan.name,
            "uid": job["metadata"]["uid"],
            "controller": False,
            "blockOwnerDeletion": False,
        }
        for _ in range(_ATTEMPTS):
            try:
                self.objects["Service"] = self.api.set_owners("Service", service, [reference], {})
                return
            except (Conflict, Missing):
                current = self.api.get("Service", self.plan.name)
                if current is None or current["metadata"]["uid"] != service["metadata"]["uid"]:
                    raise Retryable(f"Service {self.plan.name} was deleted while it was used; run again") from None
                service = current
        raise Retryable(f"Service {self.plan.name} keeps changing; run again")


def _bears(found: JsonObject, attempt: Attempt) -> bool:
    """Whether an object has the uid or the token of an attempt."""
    metadata = found["metadata"]
    token = (metadata.get("annotations") or {}).get(INTENT_ANNOTATION)
    return metadata["uid"] in attempt.owned or token == attempt.intent.token


def _ended_badly(found: JsonObject) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or []
    return any(item["type"] in ("Failed", "FailureTarget") and item["status"] == "True" for item in conditions)


def strangers(api: ClusterApi, attempt: Attempt) -> list[str]:
    """Objects that a journal claims by uid and that no stage of its run can have made: their labels say otherwise.

    A journal is data in a store that several people may write to; what it claims wrongly must not be deleted.
    """
    place, intent = attempt.place, attempt.intent
    found: list[str] = []
    for kind in OBJECT_KINDS:
        current = api.get(kind, intent.name)
        if current is None or current["metadata"]["uid"] not in attempt.live:
            continue
        observed = current["metadata"].get("labels") or {}
        expected = stage_labels(place.run, place.transaction, place.stage, intent.name)
        if not expected.items() <= observed.items():
            found.append(f"{kind} {intent.namespace}/{intent.name} (uid {current['metadata']['uid']})")
    return found


def remaining(api: ClusterApi, attempt: Attempt, *, within: float | None = None) -> list[Removal]:
    """What of an attempt is still there: its live uids, and objects that bear its token but whose uid it never stored.

    Raises:
        Unreachable: the server does not answer.
    """
    found: list[Removal] = []
    place, intent = attempt.place, attempt.intent
    for kind in reversed(OBJECT_KINDS):  # the Job, which holds nodes, before the Service
        current = api.get(kind, intent.name, within=within)
        if current is None:
            continue
        metadata = current["metadata"]
        token = (metadata.get("annotations") or {}).get(INTENT_ANNOTATION)
        if metadata["uid"] in attempt.live or (token == intent.token and metadata["uid"] not in attempt.gone):
            found.append(
                Removal(
                    kind, intent.namespace, intent.name, metadata["uid"], place.attempt, place.stage, place.transaction
                )
            )
    return found


def give_back(api: ClusterApi, attempt: Attempt, *, reason: str, within: float | None = None) -> list[Removal]:
    """Delete everything an attempt still owns, by uid, and close its journal. Doing it again changes nothing.

    The deletions come before anything that only informs: there may be little time left.

    Raises:
        Retryable: the server or the store does not answer; what was deleted is recorded as far as possible.
    """
    removed: list[Removal] = []
    for uid, kind in sorted(attempt.live.items(), key=lambda item: item[1] != "Job"):
        if api.delete(kind, attempt.intent.name, uid, within=within):
            place = attempt.place
            removed.append(
                Removal(
                    kind,
                    attempt.intent.namespace,
                    attempt.intent.name,
                    uid,
                    place.attempt,
                    place.stage,
                    place.transaction,
                )
            )
    for uid in list(attempt.live):
        attempt.append(Deleted(uid=uid))
    for leftover in remaining(api, attempt, within=within):  # created, but its uid was never stored
        attempt.append(Owned(object=leftover.kind, uid=leftover.uid))
        if api.delete(leftover.kind, leftover.name, leftover.uid, within=within):
            removed.append(leftover)
        attempt.append(Deleted(uid=leftover.uid))
    if not attempt.closed:
        attempt.append(Closed(reason=reason))
    return removed


def open_attempts(store: Any, run: str) -> list[Attempt]:
    """Attempts of a run that may still own something."""
    return [attempt for attempt in read_attempts(store, run) if not attempt.closed]

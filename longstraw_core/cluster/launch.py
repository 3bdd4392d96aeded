"""One multi-pod stage from plan to end: journal, objects, watch, log, verdict, and everything given back."""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from longstraw_core.artifacts.store import Store
from longstraw_core.cluster.api import ClusterApi, NotSignedIn, Patience
from longstraw_core.cluster.cleanup import close_superseded, forget_heartbeat, reap
from longstraw_core.cluster.diagnosis import Completed, Failed, Waiting, container_started, judge, pod_index
from longstraw_core.cluster.heartbeat import BEAT_SECONDS, Heart
from longstraw_core.cluster.journal import LauncherPod, attempts_of_stage, open_attempt
from longstraw_core.cluster.logs import LogFollower, print_tails
from longstraw_core.cluster.manifests import Owner
from longstraw_core.cluster.names import JOB_LABEL
from longstraw_core.cluster.ownership import GONE_SECONDS, Ownership, Superseded
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.cluster.termination import Terminated, signals_ignored, terminated_by_signal
from longstraw_core.cluster.watching import Notice, ResourceWatch, Seen, Trouble
from longstraw_core.spec import IntegrityError, LongStrawError, Retryable, SpecError, StageFailed

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class LaunchTimes:
    """How long a launcher waits for what; seconds."""

    patience: Patience = field(default_factory=Patience)
    heartbeat: float = BEAT_SECONDS
    image: float = 300.0
    """Until an image that cannot be pulled, or a container that cannot start, fails the stage."""
    progress: float = 60.0
    """Between two progress lines."""
    log_end: float = 10.0
    """For the rest of rank 0's log after its pod ended."""
    gone: float = GONE_SECONDS
    tick: float = 1.0


def launch(
    plan: PlacementPlan,
    *,
    store: Store,
    api: ClusterApi,
    launcher: LauncherPod | None,
    say: Callable[[str], None],
    times: LaunchTimes | None = None,
) -> None:
    """Run the plan's pods to completion; whatever happens, nothing of it is left, or the journal says what is.

    Args:
        plan: What to run.
        store: Where journal, heartbeat, request and receipt are.
        api: The cluster, in the plan's namespace.
        launcher: The pod this runs in, which will own the Job; None outside of a cluster.
        say: Prints one line.
        times: How long to wait for what.

    Raises:
        LongStrawError: the stage failed, for the reason that its pods or the cluster gave.
        Terminated: SIGTERM arrived; what was created has been deleted.
    """
    times = times or LaunchTimes()
    with terminated_by_signal():
        attempt = open_attempt(
            store,
            run=plan.run,
            transaction=plan.transaction,
            stage=plan.stage,
            plan=plan.digest,
            namespace=plan.namespace,
            name=plan.name,
            launcher=launcher,
        )
        # read after the number is taken: whoever has a lower one stored its intent before
        earlier = [other for other in attempts_of_stage(store, attempt.place) if other.place < attempt.place]
        owner = None if launcher is None else Owner(launcher.name, launcher.uid)
        ownership = Ownership(api, plan, attempt, earlier, owner, say, gone_seconds=times.gone)
        heart = Heart(store, f"{plan.prefix}heartbeat/", attempt.place.attempt, interval=times.heartbeat, complain=say)
        try:
            heart.start()
            reap(store, api, attempt, say)
            ownership.establish()
            close_superseded(api, earlier)
            _Run(plan, api, heart, say, times).to_the_end()
        except BaseException as error:
            _roll_back(ownership, heart, times, error)
            raise
        _give_back_after_success(ownership, heart, times)
    forget_heartbeat(store, attempt)


@dataclass
class _Run:
    """The watch over one Job."""

    plan: PlacementPlan
    api: ClusterApi
    heart: Heart
    say: Callable[[str], None]
    times: LaunchTimes
    job: JsonObject | None = None
    job_seen: bool = False
    pods: tuple[JsonObject, ...] = ()
    pods_seen: bool = False
    log: LogFollower | None = None
    waiting: str = ""
    waiting_since: float = 0.0
    trouble: dict[str, "_Outage"] = field(default_factory=dict[str, "_Outage"])
    """By resource: since when the server has not answered about it."""
    last_line: float = 0.0

    def to_the_end(self) -> None:
        """Return when the stage is complete; raise what its failure means."""
        notices: queue.Queue[Notice] = queue.Queue()
        watches = [
            ResourceWatch(self.api, "jobs", f"metadata.name={self.plan.name}", notices),
            ResourceWatch(self.api, "pods", f"{JOB_LABEL}={self.plan.name}", notices),
        ]
        started = time.monotonic()
        self.waiting_since = started
        for watch in watches:
            watch.start()
        try:
            while True:
                self._take(notices)
                if self.heart.superseded.is_set():
                    raise Superseded(f"a later attempt of {self.plan.stage} has taken over; this one ends")
                if self._verdict(time.monotonic() - started):
                    return
        finally:
            for watch in watches:
                watch.stop()
            if self.log is not None:
                self.log.finish(within=0.0)

    def _take(self, notices: "queue.Queue[Notice]") -> None:
        """Take everything that was noticed, waiting for at most one tick."""
        try:
            notice = notices.get(timeout=self.times.tick)
            while True:
                self._note(notice)
                notice = notices.get_nowait()
        except queue.Empty:
            pass
        now = time.monotonic()
        for resource, outage in self.trouble.items():
            silent = now - outage.since
            if isinstance(outage.error, NotSignedIn) and silent > self.times.patience.sign_in_seconds:
                raise outage.error
            if silent > self.times.patience.outage_seconds:
                raise Retryable(
                    f"the Kubernetes API server has not answered about {resource} for {silent:.0f} s; the pods "
                    "end by themselves when the heartbeat stops: run again"
                )

    def _note(self, notice: Notice) -> None:
        if isinstance(notice, Trouble):
            if isinstance(notice.error, SpecError) and not isinstance(notice.error, NotSignedIn):
                raise notice.error
            if notice.resource not in self.trouble:
                self.say(f"waiting for the Kubernetes API server: {notice.error}")
            since = self.trouble[notice.resource].since if notice.resource in self.trouble else time.monotonic()
            self.trouble[notice.resource] = _Outage(since, notice.error)
            return
        if self.trouble.pop(notice.resource, None) is not None:
            self.say(f"the Kubernetes API server answers again about {notice.resource}")
        self._see(notice)

    def _see(self, seen: Seen) -> None:
        if seen.resource == "jobs":
            self.job, self.job_seen = (seen.objects[0] if seen.objects else None), True
            return
        # pods that are gone were seen with their last state; what they ran in was checked then
        current = {pod["metadata"]["uid"]: pod for pod in seen.objects}
        kept = [pod for pod in self.pods if pod["metadata"]["uid"] not in current and _ended(pod)]
        self.pods, self.pods_seen = (*current.values(), *kept), True
        first = next((pod for pod in current.values() if pod_index(pod) == 0 and container_started(pod)), None)
        if first is not None and self.log is None:
            self.log = LogFollower(self.api, first["metadata"]["name"], "rank 0", self.say)
            self.log.start()

    def _verdict(self, elapsed: float) -> bool:
        if not (self.job_seen and self.pods_seen):
            return False
        verdict = judge(self.plan, self.job, self.pods)
        if isinstance(verdict, Completed):
            if self.log is not None:
                self.log.finish(within=self.times.log_end)
            self.say(f"all {self.plan.placement.nodes} pods completed in image {self.plan.image_digest}")
            return True
        if isinstance(verdict, Failed):
            print_tails(self.api, verdict.pods, self.say)
            raise verdict.error
        self._wait_on(verdict, elapsed)
        return False

    def _wait_on(self, verdict: Waiting, elapsed: float) -> None:
        now = time.monotonic()
        if verdict.reason != self.waiting:
            self.waiting, self.waiting_since, self.last_line = verdict.reason, now, 0.0
        if now - self.last_line > self.times.progress or self.last_line == 0.0:
            self.last_line = now
            self.say(f"{verdict.message}; {elapsed:.0f} s")
        waited = now - self.waiting_since
        if verdict.reason in ("pods", "nodes") and waited > self.plan.placement.scheduling_seconds:
            said = self.api.warnings(self.plan.name)
            raise Retryable(
                f"{verdict.message} after {waited:.0f} s{f' ({said[-1]})' if said else ''}; "
                "free nodes or quota, or ask for less"
            )
        if verdict.reason == "evidence" and waited > self.times.log_end:
            raise IntegrityError(f"{verdict.message}, so that nothing says which code ran; run again")
        if verdict.reason == "cause" and waited > self.times.log_end:
            raise StageFailed(verdict.message)
        if verdict.reason in ("image", "configuration") and waited > self.times.image:
            raise SpecError(f"{verdict.message}; after {waited:.0f} s of trying")


@dataclass(frozen=True, slots=True)
class _Outage:
    """The server does not answer about a resource."""

    since: float
    error: LongStrawError
    """What it, or the connection to it, said last."""


def _ended(pod: JsonObject) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _roll_back(ownership: Ownership, heart: Heart, times: LaunchTimes, error: BaseException) -> None:
    """Give everything back; when that fails, say what is left and let the first error stand."""
    attempt, say = ownership.attempt, ownership.say
    try:
        with signals_ignored():
            if isinstance(error, Superseded) or heart.superseded.is_set():
                return  # the objects are another attempt's by now, and so is closing this one
            if not isinstance(error, Terminated):  # then every moment counts, and no later attempt can have begun
                with suppress(LongStrawError):  # without the store, what this attempt remembers must do
                    attempt.refresh()
            for item in ownership.give_back(within=times.patience.rollback_seconds):
                say(f"{item.kind} {item.name} deleted")
            forget_heartbeat(ownership.attempt.store, attempt)
    except LongStrawError as failure:
        left = ", ".join(f"{kind} {attempt.intent.name}" for kind in attempt.live.values()) or "what was created"
        say(
            f"not deleted: {left} ({failure}); its pods end without heartbeat, and "
            f"`longstraw cleanup {attempt.place.run}` deletes the rest"
        )
    finally:
        heart.stop()


def _give_back_after_success(ownership: Ownership, heart: Heart, times: LaunchTimes) -> None:
    """The work is done: that the objects cannot be deleted now does not undo it."""
    try:
        with suppress(LongStrawError):
            ownership.attempt.refresh()  # what a later attempt has adopted meanwhile is not deleted under it
        ownership.give_back(within=times.patience.rollback_seconds)
    except LongStrawError as failure:
        ownership.say(f"the finished Job was not deleted: {failure}; Kubernetes does it after its time")
    finally:
        heart.stop()

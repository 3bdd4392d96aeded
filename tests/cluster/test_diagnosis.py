"""What a Job and its pods mean, where the two are seen at different times."""

from collections.abc import Callable
from typing import Any

import pytest

from longstraw_core.cluster.diagnosis import Failed, Waiting, judge
from longstraw_core.cluster.placement import PlacementPlan
from longstraw_core.spec import IntegrityError, StageFailed


def failed_job(reason: str) -> dict[str, Any]:
    condition = {"type": "Failed", "status": "True", "reason": reason, "message": "Pod x matching FailJob rule"}
    return {"metadata": {"name": "x"}, "status": {"conditions": [condition]}}


def test_a_job_that_failed_before_its_pod_is_seen_waits_for_the_cause(
    make_test_plan: Callable[..., PlacementPlan],
) -> None:
    plan = make_test_plan()
    early = judge(plan, failed_job("PodFailurePolicy"), ())
    assert isinstance(early, Waiting)
    assert early.reason == "cause"
    pod = {
        "metadata": {"name": "x-0", "annotations": {"batch.kubernetes.io/job-completion-index": "0"}},
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "worker", "imageID": plan.image, "state": {"terminated": {"exitCode": 11, "reason": "Error"}}}
            ],
        },
    }
    late = judge(plan, failed_job("PodFailurePolicy"), (pod,))
    assert isinstance(late, Failed)
    assert isinstance(late.error, IntegrityError)


def test_a_deadline_needs_no_pod_to_say_why(make_test_plan: Callable[..., PlacementPlan]) -> None:
    verdict = judge(make_test_plan(), failed_job("DeadlineExceeded"), ())
    assert isinstance(verdict, Failed)
    assert isinstance(verdict.error, StageFailed)
    with pytest.raises(StageFailed, match="timeout_minutes"):
        raise verdict.error

"""The reward `python`: a team's own function, called once per response in a killable worker process.

The contract is in docs/rewards.md. A response on which the function raises or does not return in time gets −1 and
says so in status and rule; a function that fails on every response is a fault of the function and stops the stage.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from longstraw_core.rewards.verdict import Verdict
from longstraw_core.rewards.workers import WorkerPool
from longstraw_core.spec import SpecError


class PlugInScorer:
    """Calls `package.module:function` in workers; use as a context manager, so that they end."""

    def __init__(self, function: str, *, deadline_seconds: float, workers: int | None = None) -> None:
        self._function = function
        self._pool = WorkerPool(("python", function), deadline_seconds=deadline_seconds, workers=workers)

    @property
    def name(self) -> str:
        """The rule, as receipts show it."""
        return f"python:{self._function}"

    def __enter__(self) -> "PlugInScorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def require_usable(self) -> None:
        """Import the function in a worker.

        Raises:
            SpecError: it cannot be imported.
        """
        self._pool.start()

    def truth_problem(self, ground_truth: str) -> str | None:
        """Only an empty ground truth is known to be useless; what else it means is the function's business."""
        return None if ground_truth.strip() else "is empty"

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return the verdict on every (response, ground truth), in order.

        Raises:
            SpecError: the function cannot be imported, or raised on every response.
        """
        usable = [place for place, (_, truth) in enumerate(pairs) if self.truth_problem(truth) is None]
        tasks = [{"response": pairs[place][0], "ground_truth": pairs[place][1]} for place in usable]
        outcomes = self._pool.run(tasks)
        reasons = [outcome["failed"] for outcome in outcomes if not isinstance(outcome, str) and "failed" in outcome]
        if reasons and len(reasons) == len(outcomes):
            raise SpecError(f"reward.function {self._function} raised on every response: {reasons[0]}; correct it")
        verdicts = [Verdict(-1.0, False, "bad_row", None, self.name)] * len(pairs)
        for place, outcome in zip(usable, outcomes, strict=True):
            verdicts[place] = self._verdict(outcome)
        return verdicts

    def _verdict(self, outcome: Mapping[str, Any] | str) -> Verdict:
        if isinstance(outcome, str):
            rule = "deadline" if outcome == "timeout" else "worker_died"
            return Verdict(-1.0, False, "timeout", None, f"{self.name}:{rule}")
        if "failed" in outcome:
            return Verdict(-1.0, False, "no_answer", None, f"{self.name}:raised {outcome['failed']}"[:300])
        rule = f"{self.name}:{outcome['rule']}" if outcome["rule"] else self.name
        return Verdict(outcome["score"], outcome["correct"], "ok", outcome["extracted"], rule[:300])

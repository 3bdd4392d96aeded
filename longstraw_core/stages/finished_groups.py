"""The groups that `sample` has finished, kept in the store until its receipt exists."""

from collections.abc import Sequence

from pydantic import ValidationError

from longstraw_core.artifacts.finished_work import finished_name, get_finished, put_finished
from longstraw_core.spec import Prompt, Rollout, canonical_json, sha256_digest
from longstraw_core.stages.context import StageContext
from longstraw_core.stages.source import source_digest


class FinishedGroups:
    """Stores and finds whole groups; a group counts only for the same specification, code, adapter and prompt."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._identity = {
            "spec": sha256_digest(canonical_json(context.spec)),
            "source": source_digest(),
            "receipts": {stage: context.inputs[f"receipt:{stage}"].digest for stage in context.receipts},
        }

    def get(self, number: int, prompt: Prompt) -> list[Rollout] | None:
        """Return the group of prompt `number` (from 0), None when it is not finished or not verified."""
        content = get_finished(self._context.store, self._name(number), self._digest(number, prompt))
        if content is None:
            return None
        try:
            group = [Rollout.model_validate_json(line) for line in content.splitlines()]
        except ValidationError:
            return None
        whole = [rollout.index for rollout in group] == list(range(self._context.spec.sampling.group_size))
        same = all((one.prompt_id, one.prompt_token_ids) == (prompt.prompt_id, prompt.token_ids) for one in group)
        return group if whole and same else None

    def put(self, number: int, prompt: Prompt, group: Sequence[Rollout]) -> None:
        """Store the group of prompt `number`."""
        content = b"".join(canonical_json(rollout) + b"\n" for rollout in group)
        put_finished(self._context.store, self._name(number), self._digest(number, prompt), content)

    def _name(self, number: int) -> str:
        return finished_name(self._context.run, self._context.transaction, "sample", number)

    def _digest(self, number: int, prompt: Prompt) -> str:
        return sha256_digest(canonical_json({**self._identity, "number": number, "prompt": prompt.to_json_object()}))

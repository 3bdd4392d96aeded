"""Stage `sample`: a group of responses for every prompt, from the current adapter, by one of two engines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longstraw_core.spec import Descriptor, Prompt, Rollout, StageFailed
from longstraw_core.stages.context import StageContext, StageResult
from longstraw_core.stages.finished_groups import FinishedGroups

if TYPE_CHECKING:
    from longstraw_core.spec.transaction import SamplingSpec


@dataclass(frozen=True)
class Missing:
    """What an engine is asked for: the prompts without a finished group, by their number."""

    prompts: dict[int, Prompt]
    finished: Callable[[int, Sequence[Rollout]], None]
    """Called with a prompt's number and its whole group, as soon as that exists."""
    tokens_used: int
    """Response tokens of the groups that were finished before."""


def execute(context: StageContext) -> StageResult:
    """Publish `rollouts`, grouped by prompt in the order of the prompts, and the server's log where there is one."""
    prompts = context.read_records("audit_data", "prompts", Prompt)
    store = FinishedGroups(context)
    groups: dict[int, Sequence[Rollout]] = {}
    for number, prompt in enumerate(prompts):
        group = store.get(number, prompt)
        if group is not None:
            groups[number] = group

    def keep(number: int, group: Sequence[Rollout]) -> None:
        groups[number] = group
        store.put(number, prompts[number], group)

    resumed = len(groups)
    if resumed:
        context.log.progress("groups found finished", resumed, len(prompts))
    missing = Missing(
        prompts={number: prompt for number, prompt in enumerate(prompts) if number not in groups},
        finished=keep,
        tokens_used=sum(len(rollout.token_ids) for group in groups.values() for rollout in group),
    )
    outputs: dict[str, Descriptor] = {}
    facts = {"sampling_engine": context.spec.sampling.engine}
    if context.spec.sampling.engine == "sglang":
        from longstraw_core.stages.sample_with_server import sample_with_server

        sampled = sample_with_server(context, missing)
        outputs |= sampled.outputs
        facts |= sampled.facts
    else:
        _sample_here(context, missing)
    rollouts = [rollout for number in range(len(prompts)) for rollout in groups[number]]
    outputs["rollouts"] = context.write_records(rollouts)
    metrics = sampling_metrics([groups[number] for number in range(len(prompts))])
    if metrics["sampling/identical_groups"]:
        facts["identical_responses"] = "all responses of at least one group are the same: look at seeds and temperature"
    return StageResult(
        outputs={name: outputs[name] for name in sorted(outputs)},
        metrics=metrics | {"sampling/groups_resumed": float(resumed)},
        facts=facts,
    )


def sampling_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """What was sampled: counts, lengths, and how many responses did not end by themselves or repeat another."""
    rollouts = [rollout for group in groups for rollout in group]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    different = [len({rollout.token_ids for rollout in group}) for group in groups]
    return {
        "sampling/responses": float(len(rollouts)),
        "sampling/tokens": float(tokens),
        "sampling/truncated": float(sum(rollout.finish_reason == "length" for rollout in rollouts)),
        "sampling/aborted": float(sum(rollout.finish_reason == "abort" for rollout in rollouts)),
        "sampling/repeated_responses": float(len(rollouts) - sum(different)),
        "sampling/identical_groups": float(
            sum(count == 1 and len(group) > 1 for count, group in zip(different, groups, strict=True))
        ),
        "completions/mean_length": tokens / len(rollouts),
        "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }


def _sample_here(context: StageContext, missing: Missing) -> None:
    """Sample in this process with transformers' `generate`."""
    from transformers import AutoTokenizer

    from longstraw_core.rollout.transformers_sampler import check_prompt, sample_group
    from longstraw_core.training.model import load_policy_model

    spec = context.spec
    adapter = context.open_tree("export_lora", "adapter")
    snapshot = context.model_snapshot()
    with context.phase("load model"):
        model: Any = load_policy_model(snapshot, adapter, spec.model)
        tokenizer = AutoTokenizer.from_pretrained(snapshot, local_files_only=True)
    for prompt in missing.prompts.values():
        check_prompt(model.config, prompt, spec.sampling.max_response_tokens)
    limits = _Limits(spec.sampling, missing.tokens_used)
    with context.phase("sample"):
        for done, (number, prompt) in enumerate(missing.prompts.items(), start=1):
            limits.check_group_may_start(done - 1, len(missing.prompts))
            group = sample_group(
                model,
                tokenizer,
                prompt,
                spec.sampling,
                seed=spec.seed,
                transaction=context.transaction,
                prompt_chunk_tokens=spec.layout.prompt_chunk_tokens,
                adapter_on_prompt=spec.objective.gradient != "response_adapter",
            )
            limits.tokens_used += sum(len(rollout.token_ids) for rollout in group)
            missing.finished(number, group)
            context.log.progress("groups sampled", done, len(missing.prompts))


class _Limits:
    """Time and tokens of one transaction, for an engine that samples a whole group at once."""

    def __init__(self, sampling: "SamplingSpec", tokens_used: int) -> None:
        self._sampling = sampling
        self._deadline = time.monotonic() + sampling.timeout_seconds
        self.tokens_used = tokens_used

    def check_group_may_start(self, done: int, total: int) -> None:
        """Raise StageFailed when the time is over or a whole group might exceed the tokens."""
        if time.monotonic() >= self._deadline:
            raise StageFailed(
                f"sampling.timeout_seconds ({self._sampling.timeout_seconds:g} s) is over with {done} of {total} "
                "groups sampled; the same command continues with the groups that are missing"
            )
        most = self._sampling.group_size * self._sampling.max_response_tokens
        allowed = self._sampling.max_total_tokens
        if allowed is not None and self.tokens_used + most > allowed:
            raise StageFailed(
                f"sampling.max_total_tokens ({allowed}) does not suffice: {done} of {total} groups are sampled; "
                "raise it, or lower max_response_tokens or group_size"
            )

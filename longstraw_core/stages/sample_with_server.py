"""Sampling by an SGLang server that lives in this stage; SGLang's environment and ours need nothing of each other."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstraw_core.rewards.prompt_tokens import read_model_limits
from longstraw_core.rollout.end_tokens import read_end_tokens
from longstraw_core.rollout.reply import Wanted, sample_seed
from longstraw_core.rollout.seeds import rollout_seed
from longstraw_core.rollout.served_model import write_served_model
from longstraw_core.rollout.server_command import SGLANG_VERSION, ServedPolicy, context_length
from longstraw_core.rollout.sglang_sampler import probe, sample_groups
from longstraw_core.rollout.sglang_server import SglangServer
from longstraw_core.spec import DataRefused, Descriptor, NumericError, Prompt, Rollout, StageFailed
from longstraw_core.stages.context import StageContext

if TYPE_CHECKING:
    from longstraw_core.stages.sample import Missing

MEDIA_TYPE_LOG = "text/plain"


@dataclass(frozen=True)
class SampledByServer:
    """What the stage publishes beside the rollouts."""

    outputs: dict[str, Descriptor]
    facts: dict[str, str]


def served_policy(context: StageContext) -> ServedPolicy:
    """Verify snapshot and served adapter, and lay out the directory that a server is started on."""
    spec = context.spec
    served = context.open_tree("export_lora", "served")
    snapshot = context.model_snapshot()
    model = write_served_model(
        served if spec.sampling.server.merge else snapshot, context.scratch / "served-model", spec.model.rope_scaling
    )
    return ServedPolicy(
        model=model,
        adapter=None if spec.sampling.server.merge else served,
        dtype=spec.model.dtype,
        positions=read_model_limits(snapshot, spec.model.rope_scaling).positions,
    )


def sample_with_server(context: StageContext, missing: "Missing") -> SampledByServer:
    """Start the server, sample every missing group, stop the server; nothing of it lives afterwards.

    Raises:
        DataRefused: a prompt does not fit.
        StageFailed, NumericError: the server failed; its log is stored and its last lines are in the message.
    """
    if not missing.prompts:
        return SampledByServer({}, {})
    from transformers import AutoTokenizer

    spec = context.spec
    sampling = spec.sampling
    policy = served_policy(context)
    snapshot = Path(spec.model.snapshot)
    tokenizer: Any = AutoTokenizer.from_pretrained(snapshot, local_files_only=True)
    end_tokens = read_end_tokens(snapshot, tokenizer)
    limits = read_model_limits(snapshot, spec.model.rope_scaling)
    _check_lengths(missing.prompts.values(), sampling.max_response_tokens, context_length(policy, sampling.server))
    groups = [
        [
            Wanted(
                prompt=prompt,
                index=index,
                seed=sample_seed(rollout_seed(spec.seed, context.transaction, prompt.prompt_id), index),
                max_tokens=sampling.max_response_tokens,
                temperature=sampling.temperature,
                end_tokens=end_tokens,
                vocabulary=limits.vocabulary,
                adapter=policy.adapter is not None,
            )
            for index in range(sampling.group_size)
        ]
        for prompt in missing.prompts.values()
    ]
    numbers = {prompt.prompt_id: number for number, prompt in missing.prompts.items()}

    def finished(prompt_id: str, group: Sequence[Rollout]) -> None:
        missing.finished(numbers[prompt_id], [with_text(rollout, tokenizer) for rollout in group])

    server = SglangServer(
        policy,
        sampling.server,
        seed=spec.seed,
        logs=context.scratch / "server-logs",
        connections=sampling.concurrent_requests + 2,
    )
    with _log_in_message(context, server):
        with context.phase("start server"):
            server.launch(lambda reason: context.log.emit("server_launched_again", reason=reason))
        with context.phase("sample"):
            probe(server.client, groups[0][0])
            sample_groups(
                server.client,
                groups,
                sampling,
                finished=finished,
                progress=context.log.progress,
                tokens_used=missing.tokens_used,
                check_alive=lambda: server.check_alive("sampling"),
            )
        with context.phase("stop server"):
            server.stop()
    return SampledByServer(
        {"server_log": _publish_log(context, server)}, {"sampling_server": f"sglang {SGLANG_VERSION}"}
    )


def with_text(rollout: Rollout, tokenizer: Any) -> Rollout:
    """Add the text, decoded as the other engine decodes it; token ids stay those sampled."""
    text = str(tokenizer.decode(list(rollout.token_ids), skip_special_tokens=True))
    return rollout.model_copy(update={"text": text})


def _check_lengths(prompts: Iterable[Prompt], max_response_tokens: int, length: int) -> None:
    for prompt in prompts:
        needed = len(prompt.token_ids) + max_response_tokens
        if needed > length:
            raise DataRefused(
                f"prompt {prompt.prompt_id} (row {prompt.row}): {len(prompt.token_ids)} prompt tokens + "
                f"{max_response_tokens} response tokens = {needed} exceed the {length} that the server is started for; "
                "raise sampling.server.context_length or lower sampling.max_response_tokens"
            )


@contextmanager
def _log_in_message(context: StageContext, server: SglangServer) -> Iterator[None]:
    """Stop the server whatever happens, and let a failure name the stored log and the reason in it."""
    try:
        yield
    except (StageFailed, NumericError) as failure:
        reason = server.explain(failure) if isinstance(failure, StageFailed) else failure
        server.stop()
        kind = NumericError if isinstance(reason, NumericError) else StageFailed
        raise kind(f"{reason}; whole log: {_publish_log(context, server).uri}") from failure
    except BaseException:
        server.stop()
        raise


def _publish_log(context: StageContext, server: SglangServer) -> Descriptor:
    content = b"".join(b"== " + log.name.encode() + b"\n" + log.read_bytes() for log in server.logs)
    return context.store.put_blob(content or b"(nothing was started)\n", MEDIA_TYPE_LOG)

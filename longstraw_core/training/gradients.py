"""The finalised gradient of one group without an optimizer step: what `longstraw gradients` computes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from longstraw_core.engine.admission import admit_length, admit_tokens
from longstraw_core.engine.objective import Normaliser, ObjectiveMetrics
from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.resident.prefix_state import PrefixState
from longstraw_core.spec.canonical import canonical_json
from longstraw_core.spec.errors import DataRefused, IntegrityError, NumericError, SpecError
from longstraw_core.spec.gradient_batch import GradientBatch, parse_gradient_batch
from longstraw_core.spec.model import Count, FiniteFloat, StrictModel
from longstraw_core.spec.receipts import GradientMode, Phase
from longstraw_core.spec.records import ResponseLogprobs, Rollout, Score, ScoredGroup
from longstraw_core.spec.transaction import Family, LayoutSpec, ModelSpec, ObjectiveSpec, OptimizerSpec
from longstraw_core.training.expert_tensors import whole_tensors
from longstraw_core.training.lora import expert_count
from longstraw_core.training.model import keeping, load_policy_model
from longstraw_core.training.optimizer_choice import make_optimizer
from longstraw_core.training.phases import PhaseClock, peak_memory_bytes
from longstraw_core.training.process_groups import Ranks
from longstraw_core.training.update import UpdateGroup, accumulate_gradients

_PROMPT = "batch"
_MAX_LOGPROB = 0.0


@dataclass(frozen=True)
class GroupGradients:
    """The gradient of one group and what was measured on the way."""

    gradients: dict[str, torch.Tensor]
    """fp32, by PEFT's state-dict names."""
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities of every response under the loaded policy."""
    loss: float
    gradient_norm: float
    peak_memory_bytes: int
    phases: tuple[Phase, ...]


class GradientsRequest(StrictModel):
    """What every rank of `longstraw gradients` is asked for."""

    model: str
    adapter: str
    batch: str
    """The batch file's text, which the launcher has parsed."""
    source: str
    gradient: GradientMode
    dtype: str
    quantization: Literal["nf4"] | None = None
    layout: LayoutSpec
    out: str
    """Safetensors file for rank 0 to write."""


class GradientsSummary(StrictModel):
    """`GroupGradients` without the gradients."""

    logprobs: tuple[tuple[FiniteFloat, ...], ...]
    loss: FiniteFloat
    gradient_norm: FiniteFloat
    tensors: Count
    peak_memory_bytes: Count
    """Of the rank with the largest."""
    phases: tuple[Phase, ...]
    """Of rank 0."""


def gradients_on_rank(request: bytes, ranks: Ranks) -> bytes:
    """Compute the gradient on one of the ranks; rank 0 writes it, every rank returns the summary."""
    asked = GradientsRequest.model_validate_json(request)
    batch = parse_gradient_batch(asked.batch.encode(), asked.source)
    policy = open_policy(
        Path(asked.model),
        Path(asked.adapter),
        asked.layout,
        gradient=asked.gradient,
        dtype=asked.dtype,
        quantization=asked.quantization,
        ranks=ranks,
    )
    admit_batch(policy, batch, asked.source)
    result = group_gradients(policy, batch, ranks)
    if ranks.rank == 0:
        save_file(result.gradients, asked.out, metadata={"format": "pt", "gradient": asked.gradient})
    summary = GradientsSummary(
        logprobs=result.logprobs,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        tensors=len(result.gradients),
        peak_memory_bytes=max(int(peak) for peak in ranks.gather(str(result.peak_memory_bytes).encode())),
        phases=result.phases,
    )
    return canonical_json(summary)


def open_policy(
    model: Path,
    adapter: Path,
    layout: LayoutSpec,
    *,
    gradient: GradientMode,
    dtype: str,
    quantization: Literal["nf4"] | None = None,
    ranks: Ranks | None = None,
) -> Policy:
    """Load a snapshot, whose family its configuration names, and its adapter.

    Args:
        dtype: `float32`, `bfloat16`, or `auto` for what the configuration says.
        quantization: how the layers' frozen matrices are kept.

    Raises:
        SpecError: any fault of the two directories: this command's files are its arguments, so a damaged or
            mismatching one is wrong usage.
    """
    ranks = ranks or Ranks.alone()
    try:
        spec = _model_spec(model, dtype).model_copy(update={"quantization": quantization})
        loaded = load_policy_model(
            model,
            adapter,
            spec,
            device=str(ranks.device),
            experts=ranks.experts,
            kept=keeping(spec, layout, ranks.context),
        )
        return Policy(loaded, layout, gradient=gradient, context=ranks.context, experts=ranks.experts)
    except IntegrityError as error:
        raise SpecError(str(error)) from error


def _model_spec(model: Path, dtype: str) -> ModelSpec:
    if not (model / "config.json").is_file():
        raise SpecError(f"{model}: has no config.json; point at a Hugging Face snapshot directory")
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except Exception as error:  # transformers raises many types here, from OSError to those of its own validation
        raise SpecError(f"{model}/config.json: cannot be read: {' '.join(str(error).split())[:200]}") from error
    families: tuple[Family, ...] = get_args(Family)
    family = next((name for name in families if config.model_type in (name, name.removesuffix("_text"))), None)
    if family is None:
        raise SpecError(
            f"{model}: model type {config.model_type!r} is not supported; supported are {', '.join(families)}"
        )
    if dtype == "auto":
        stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        dtype = str(stored or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16"):
        raise SpecError(f"{model}: stored as {dtype}; choose --dtype float32 or --dtype bfloat16")
    return ModelSpec(snapshot=str(model), family=family, dtype=dtype)  # type: ignore[arg-type]


def admit_batch(policy: Policy, batch: GradientBatch, source: str) -> None:
    """Check every token and length of `batch` against the model, before anything is captured.

    Raises:
        SpecError: names the first offending response and position.
    """
    prompt = batch.prompt_token_ids
    try:
        admit_tokens(prompt, vocabulary=policy.vocabulary, name="prompt_token_ids")
        for index, response in enumerate(batch.responses):
            name = f"responses[{index}].token_ids"
            admit_tokens(response.token_ids, vocabulary=policy.vocabulary, name=name)
            admit_length(len(prompt), len(response.token_ids), max_positions=policy.max_positions)
    except DataRefused as error:
        raise SpecError(f"{source}: {error}") from error


def group_gradients(policy: Policy, batch: GradientBatch, ranks: Ranks | None = None) -> GroupGradients:
    """Compute the gradient of the batch's loss; the policy's own gradients are dropped before and after.

    All ranks call this with the same batch and get the whole gradient.

    Raises:
        NumericError: a log-probability, a loss or a gradient is not finite.
        SpecError: the prompt's state does not fit into memory.
    """
    device = policy.pool.device
    clock, metrics = PhaseClock(device), ObjectiveMetrics()
    objective = ObjectiveSpec(
        gradient=policy.gradient,
        aggregation=batch.aggregation,
        clip_low=batch.clip[0],
        clip_high=batch.clip[1],
        importance_cap=None,
    )
    ranks = ranks or Ranks.alone()
    optimizer = make_optimizer(policy.model, OptimizerSpec(max_gradient_norm=None), ranks)  # reduces; never steps
    optimizer.clear_gradients()
    with clock.phase("capture"):
        state = policy.capture(batch.prompt_token_ids, adapter=policy.captures_with_adapter)
    try:
        with clock.phase("logprobs"):
            current = _logprobs(policy, state, batch)
        group, records = _records(batch, current)
        normaliser = Normaliser.over([group], objective, max_response_tokens=batch.max_response_tokens or 1)
        if normaliser is None:
            raise AssertionError("a batch without masks always has something to train on")
        with optimizer.accumulating():
            accumulate_gradients(
                policy,
                [UpdateGroup(group, records, lambda: state)],
                objective=objective,
                normaliser=normaliser,
                metrics=metrics,
                clock=clock,
            )
    finally:
        state.release()
    with clock.phase("finalise"):
        norm = optimizer.finalise_gradients()
        local = {name: optimizer.gradient(name).detach().float().clone() for name in optimizer.parameters}
        group_of_experts = ranks.experts if optimizer.own else RankGroup.alone()
        gradients = whole_tensors(local, expert_count(policy.model), group_of_experts)
        gradients = {name: gradient.contiguous() for name, gradient in gradients.items()}
    optimizer.clear_gradients()
    phases = tuple(phase for phase in clock.phases() if phase.name != "restore")
    return GroupGradients(gradients, current, metrics.loss, norm, peak_memory_bytes(device), phases)


def _logprobs(policy: Policy, state: PrefixState, batch: GradientBatch) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities under the policy itself: what null `old_logprobs` stand for."""
    values: list[tuple[float, ...]] = []
    with torch.no_grad():
        for index, response in enumerate(batch.responses):
            logprobs_R = policy.replay(state, response.token_ids, temperature=1.0).logprobs_R
            if not bool(torch.isfinite(logprobs_R).all()):
                raise NumericError(f"responses[{index}]: a log-probability is not finite")
            values.append(tuple(logprobs_R.tolist()))
    return tuple(values)


def _records(
    batch: GradientBatch, current: tuple[tuple[float, ...], ...]
) -> tuple[ScoredGroup, tuple[ResponseLogprobs, ...]]:
    """The batch in the form that an update reads; what only sampling and rewards know is left neutral."""
    old = [
        current[index] if response.old_logprobs is None else response.old_logprobs
        for index, response in enumerate(batch.responses)
    ]
    rollouts = tuple(
        Rollout(
            prompt_id=_PROMPT,
            index=index,
            prompt_token_ids=batch.prompt_token_ids,
            token_ids=response.token_ids,
            logprobs=tuple(min(value, _MAX_LOGPROB) for value in old[index]),
            temperature=1.0,
            finish_reason="stop",
            text="",
        )
        for index, response in enumerate(batch.responses)
    )
    scores = tuple(
        Score(index=index, reward=0.0, correct=False, status="ok", extracted=None, rule=_PROMPT)
        for index in range(len(rollouts))
    )
    group = ScoredGroup(
        prompt_id=_PROMPT,
        rollouts=rollouts,
        scores=scores,
        advantages=tuple(response.advantage for response in batch.responses),
        status="signal",
        reward_mean=0.0,
        reward_std=0.0,
    )
    records = tuple(
        ResponseLogprobs(prompt_id=_PROMPT, index=index, old_logprobs=values) for index, values in enumerate(old)
    )
    return group, records

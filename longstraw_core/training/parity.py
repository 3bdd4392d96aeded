"""The parity gate: the engine's log-probabilities and gradients against conventional full-sequence training."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.layer_weights import share_loaded_layers
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import BaseWeights, LayoutSpec, OptimizerSpec, TargetPreset
from longstraw_core.training.conventional import (
    ConventionalBatch,
    ConventionalGradients,
    ModelSize,
    conventional_gradients,
    random_batch,
    random_policy_model,
)
from longstraw_core.training.optimizer_choice import make_optimizer
from longstraw_core.training.process_groups import Ranks

MAX_LOGPROB_ERROR = 5e-5
MAX_RELATIVE_L2 = 2e-5
MAX_WORST_PARAMETER = 5e-5
BFLOAT16_MARGIN = 1.1
"""bf16: the engine's error against fp32 may be this multiple of conventional bf16's: both are rounding noise."""
SMALLEST_SHARE = 1e-3
"""A parameter with less than this share of the whole gradient's norm is judged against this share."""


@dataclass(frozen=True)
class ParityCase:
    """What is compared."""

    family: str
    gradient: GradientMode
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    chunk_tokens: int
    page_tokens: int
    layers: int
    seed: int
    dtype: str
    checkpoint_layers: bool
    device: str
    targets: TargetPreset = "all"
    context_parallel: int = 1
    expert_parallel: int = 1
    base_weights: BaseWeights = "replicated"


@dataclass(frozen=True)
class Agreement:
    """How one set of gradients agrees with its reference."""

    name: str
    tensors: int
    cosine: float
    relative_l2: float


@dataclass(frozen=True)
class Check:
    """One measured figure with its tolerance."""

    name: str
    value: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the value is within tolerance; NaN is not."""
        return self.value <= self.tolerance


@dataclass(frozen=True)
class ParityReport:
    """The outcome of one case. The gate is every check, above all the worst parameter."""

    case: ParityCase
    whole: Agreement
    kinds: tuple[Agreement, ...]
    worst: Agreement
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check is within tolerance."""
        return all(check.passed for check in self.checks)


def parity_on_rank(request: bytes, ranks: Ranks) -> bytes:
    """Run a case on one of its ranks and return the report as JSON."""
    fields = json.loads(request)
    case = ParityCase(**(fields | {"response_tokens": tuple(fields["response_tokens"])}))
    return json.dumps(dataclasses.asdict(run_parity(case, ranks)), allow_nan=True).encode()


def read_report(content: bytes) -> ParityReport:
    """Return the report that `parity_on_rank` wrote."""
    fields = json.loads(content)
    return ParityReport(
        case=ParityCase(**(fields["case"] | {"response_tokens": tuple(fields["case"]["response_tokens"])})),
        whole=Agreement(**fields["whole"]),
        kinds=tuple(Agreement(**kind) for kind in fields["kinds"]),
        worst=Agreement(**fields["worst"]),
        checks=tuple(Check(**check) for check in fields["checks"]),
    )


def run_parity(case: ParityCase, ranks: Ranks | None = None) -> ParityReport:
    """Build a random model, compute its gradient both ways, compare.

    On several ranks the engine's gradient is theirs together, and rank 0 alone computes the conventional one; the
    other ranks compare the engine with itself and their report means nothing.

    fp32 compares directly. bf16 compares both ways with the fp32 conventional gradient of the same weights: the
    engine may be no further from it than conventional bf16 training is, up to `BFLOAT16_MARGIN`.
    """
    ranks = ranks or Ranks.alone()
    batch = random_batch(ModelSize().vocabulary, case.prompt_tokens, case.response_tokens, seed=case.seed + 1)
    with _full_precision_products():
        if case.dtype == "float32":
            ours, logprobs = engine_gradients(case, _model(case, torch.float32), batch, ranks)
            own = ConventionalGradients(ours, logprobs, 0.0)
            reference = _reference(case, batch, ranks, lambda: _model(case, torch.float32), own)
            worst = worst_parameter(ours, reference.gradients)
            whole = agreement("all", ours, reference.gradients, list(ours))
            checks = (
                Check("log-prob max error", _logprob_error(logprobs, reference), MAX_LOGPROB_ERROR),
                Check("worst parameter relative L2", worst.relative_l2, MAX_WORST_PARAMETER),
                Check("all parameters relative L2", whole.relative_l2, MAX_RELATIVE_L2),
            )
            return ParityReport(case, whole, by_kind(ours, reference.gradients), worst, checks)
        return _bfloat16_parity(case, batch, ranks)


def _reference(
    case: ParityCase,
    batch: ConventionalBatch,
    ranks: Ranks,
    build: Callable[[], Any],
    own: ConventionalGradients,
) -> ConventionalGradients:
    """The conventional gradient of a model of its own, on rank 0 only: the others get `own` back."""
    found = [own]

    def compute() -> None:
        found[0] = conventional_gradients(case.family, build(), batch, gradient=case.gradient)

    ranks.patiently(compute if ranks.rank == 0 else None)
    return found[0]


def _bfloat16_parity(case: ParityCase, batch: ConventionalBatch, ranks: Ranks) -> ParityReport:
    ours, logprobs = engine_gradients(case, _model(case, torch.bfloat16), batch, ranks)
    own = ConventionalGradients(ours, logprobs, 0.0)
    conventional = _reference(case, batch, ranks, lambda: _model(case, torch.bfloat16), own)
    # the same (rounded) weights, computed in fp32
    reference = _reference(case, batch, ranks, lambda: _model(case, torch.bfloat16).float(), own)
    whole = agreement("all", ours, reference.gradients, list(ours))
    theirs = agreement("all", conventional.gradients, reference.gradients, list(ours))
    conventional_logprobs = _logprob_error(conventional.logprobs, reference)
    checks = (
        Check(
            "log-prob max error, against conventional bf16's",
            _logprob_error(logprobs, reference),
            BFLOAT16_MARGIN * conventional_logprobs,
        ),
        Check(
            "all parameters relative L2, against conventional bf16's",
            whole.relative_l2,
            BFLOAT16_MARGIN * theirs.relative_l2,
        ),
    )
    worst = worst_parameter(ours, reference.gradients)
    return ParityReport(case, whole, by_kind(ours, reference.gradients), worst, checks)


def engine_gradients(
    case: ParityCase, model: Any, batch: ConventionalBatch, ranks: Ranks
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the engine's gradients over all ranks, by PEFT's names, and its log-probabilities."""
    layout = LayoutSpec(
        prompt_chunk_tokens=case.chunk_tokens,
        page_tokens=case.page_tokens,
        checkpoint_layers=case.checkpoint_layers,
    )
    if case.base_weights == "sharded" and ranks.size > 1:
        share_loaded_layers(model.get_base_model(), ranks.context, experts_divided=ranks.expert_size > 1)
    policy = Policy(model, layout, gradient=case.gradient, context=ranks.context, experts=ranks.experts)
    optimizer = make_optimizer(model, OptimizerSpec(max_gradient_norm=None), ranks)  # sums over ranks; never steps
    optimizer.clear_gradients()
    state = policy.capture(batch.prompt, adapter=policy.captures_with_adapter)
    logprobs: list[torch.Tensor] = []
    with optimizer.accumulating():
        for response, advantage in zip(batch.responses, batch.advantages, strict=True):
            logprobs_R = policy.replay(state, response, temperature=1.0).logprobs_R
            ratio_R = torch.exp(logprobs_R - logprobs_R.detach())
            (-(ratio_R * advantage).mean() / len(batch.responses)).backward()
            state.verify_witness()
            logprobs.append(logprobs_R.detach())
        if case.gradient == "exact":
            policy.reverse_sweep(state)
    state.release()
    optimizer.finalise_gradients()
    gradients = {name: optimizer.gradient(name).detach().float().clone() for name in optimizer.parameters}
    optimizer.clear_gradients()
    return gradients, logprobs


def agreement(
    name: str, ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], names: Sequence[str]
) -> Agreement:
    """Compare the tensors called `names`, taken together."""
    dot = own = true = error = 0.0
    for key in names:
        a, b = ours[key].double().flatten(), reference[key].double().flatten()
        dot += float(a @ b)
        own += float(a @ a)
        true += float(b @ b)
        error += float((a - b) @ (a - b))
    cosine = dot / (own * true) ** 0.5 if own > 0.0 and true > 0.0 else float(own == true)
    relative = (error / true) ** 0.5 if true > 0.0 else math.inf if error > 0.0 else 0.0
    return Agreement(name, len(names), cosine, relative)


def by_kind(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[Agreement, ...]:
    """Compare per kind of module (`q_proj`, …), all layers together."""
    kinds: dict[str, list[str]] = {}
    for key in ours:
        kinds.setdefault(_kind(key), []).append(key)
    return tuple(agreement(kind, ours, reference, names) for kind, names in sorted(kinds.items()))


def _kind(key: str) -> str:
    """Last name of the adapted module; of nested wrappers of the experts, `experts` and `experts.base_layer`."""
    path = key.split(".lora_")[0].split(".")
    return ".".join(path[-2:]) if path[-1] == "base_layer" else path[-1]


def worst_parameter(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> Agreement:
    """The parameter with the largest error, relative to its own norm or `SMALLEST_SHARE` of the whole gradient's.

    The share is what makes the figure mean something for parameters that hardly have a gradient: `in_proj_a` of a
    prompt of two tokens has 3e-4 of the whole norm, the key of a token that attends only to itself none, and both
    have the rounding (some 1e-8 of the whole) of sums over far larger terms. A summand that is lost anywhere still
    fails the gate as long as it is 5e-8 of the whole gradient.
    """
    if ours.keys() != reference.keys():
        raise AssertionError(f"parameters differ: {sorted(ours.keys() ^ reference.keys())}")
    smallest = SMALLEST_SHARE * sum(float(value.double().pow(2).sum()) for value in reference.values()) ** 0.5
    worst = Agreement("none", 0, 1.0, 0.0)
    for key, true in reference.items():
        found = agreement(key, ours, reference, [key])
        norm = float(true.double().norm())
        if norm < smallest:
            error = float((ours[key].double() - true.double()).norm())
            found = Agreement(key, 1, found.cosine, error / smallest)
        if math.isnan(found.relative_l2):
            found = Agreement(key, 1, found.cosine, math.inf)
        if found.relative_l2 > worst.relative_l2:
            worst = found
    return worst


def _logprob_error(ours: Sequence[torch.Tensor], reference: ConventionalGradients) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, reference.logprobs, strict=True))


def _model(case: ParityCase, dtype: torch.dtype) -> Any:
    size = ModelSize(layers=case.layers, positions=max(4096, case.prompt_tokens + max(case.response_tokens)))
    model = random_policy_model(case.family, size, targets=case.targets, seed=case.seed, dtype=dtype)
    return model.to(case.device)


@contextlib.contextmanager
def _full_precision_products() -> Iterator[None]:
    """Full fp32 products on a GPU: TF32 would hide what is measured."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed

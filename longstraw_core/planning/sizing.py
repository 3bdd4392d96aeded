"""Puts memory and work together: does a prompt fit, what is the longest that does, and how long does it take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from longstraw_core.planning.architecture import Architecture, Experts, GatedDelta
from longstraw_core.planning.memory import (
    OPTIMIZER_BYTES,
    Activations,
    Ranks,
    StateBytes,
    activation_peak,
    adapter_parameters,
    base_weights,
    resident_state,
)
from longstraw_core.planning.work import Work, transaction_work
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.model import FiniteFloat, StrictModel
from longstraw_core.spec.transaction import TransactionSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
HOST_STATE_FAMILIES = ("glm_moe_dsa",)
"""Families whose state is kept in host memory and staged layer by layer."""

_ATTENTION = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
_NETWORK = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
PRESETS = {"attention": _ATTENTION, "attention+mlp": _ATTENTION + _NETWORK, "all": _ATTENTION + _NETWORK + _EXPERTS}

Positive = Annotated[FiniteFloat, Field(gt=0.0, le=1e12)]


class DeviceFigures(StrictModel):
    """What one accelerator and its host offer; published or measured, never guessed here."""

    name: str = "accelerator"
    memory_gb: Positive
    """Memory of one accelerator in 10^9 bytes."""
    reserved_gb: Annotated[FiniteFloat, Field(ge=0.0)] = 4.0
    """Kept free for the driver, communication buffers and fragmentation."""
    host_memory_gb: Positive | None = None
    """Host memory per accelerator; None leaves the check out."""
    teraflops: Positive | None = None
    """Peak of dense products in the model's data type, 10^12 per second."""
    utilisation: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = 0.35
    """Share of the peak that is reached."""
    link_gb_per_second: Positive | None = None
    """What one accelerator sends to the others, 10^9 bytes per second."""

    @model_validator(mode="after")
    def _something_is_left(self) -> "DeviceFigures":
        if self.reserved_gb >= self.memory_gb:
            raise ValueError(f"reserved_gb {self.reserved_gb:g} leaves nothing of memory_gb {self.memory_gb:g}")
        return self


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    weights: float
    """Of the largest layer too, where layers are whole on use only."""
    adapter: float
    """fp32 weights, gradients and AdamW moments of the adapter."""
    state: float
    activations: float
    state_on_host: bool
    staged: float
    """Of a state on the host: the layer in use and the one being fetched."""

    @property
    def device(self) -> float:
        """On the accelerator."""
        return self.weights + self.adapter + self.activations + (self.staged if self.state_on_host else self.state)


@dataclass(frozen=True)
class Plan:
    """The sizes of one specification on one layout."""

    architecture: Architecture
    ranks: Ranks
    prompt_tokens: int
    adapter_parameters: int
    state: StateBytes
    state_bytes_per_token: float
    """Of all ranks together; sinks and choices of the mode included."""
    activations: Activations
    memory: RankMemory
    work: Work
    longest_prompt_tokens: int | None
    """None where no device figures are given."""
    fits: bool | None


def make_plan(
    architecture: Architecture,
    spec: TransactionSpec,
    ranks: Ranks,
    prompt_tokens: int,
    device: DeviceFigures | None,
) -> Plan:
    """Size one prompt's transaction.

    Raises:
        SpecError: the layout does not divide the model.
    """
    _check_ranks(architecture, ranks)
    gradient, layout, element = spec.objective.gradient, spec.layout, ELEMENT_BYTES[spec.model.dtype]
    targets = PRESETS[spec.lora.targets] if isinstance(spec.lora.targets, str) else spec.lora.targets
    trained = adapter_parameters(architecture, targets, spec.lora.rank)
    response = spec.sampling.max_response_tokens

    weights = base_weights(
        architecture,
        ranks,
        element=element,
        sharded=layout.base_weights == "sharded",
        quantised=spec.model.quantization == "nf4",
    )

    def state_of(tokens: int) -> StateBytes:
        return resident_state(architecture, layout, gradient, element, tokens)

    def activations_of(tokens: int) -> Activations:
        return activation_peak(
            architecture,
            layout,
            ranks,
            gradient=gradient,
            targets=targets,
            rank=spec.lora.rank,
            element=element,
            response_tokens=response,
            prompt_tokens=tokens,
        )

    def memory_of(tokens: int) -> RankMemory:
        state = state_of(tokens).total / ranks.context
        return RankMemory(
            weights=weights.kept + weights.on_use,
            adapter=float(OPTIMIZER_BYTES * trained),
            state=state,
            activations=activations_of(tokens).peak,
            state_on_host=architecture.family in HOST_STATE_FAMILIES,
            staged=2 * state / len(architecture.layers),
        )

    def fits(tokens: int) -> bool:
        return device is not None and _fits(memory_of(tokens), device)

    return Plan(
        architecture=architecture,
        ranks=ranks,
        prompt_tokens=prompt_tokens,
        adapter_parameters=trained,
        state=state_of(prompt_tokens),
        state_bytes_per_token=state_of(prompt_tokens).total / prompt_tokens,
        activations=activations_of(prompt_tokens),
        memory=memory_of(prompt_tokens),
        work=transaction_work(
            architecture,
            ranks,
            gradient=gradient,
            targets=targets,
            rank=spec.lora.rank,
            element=element,
            chunk_tokens=layout.prompt_chunk_tokens,
            checkpoint_layers=layout.checkpoint_layers,
            prompt_tokens=prompt_tokens,
            response_tokens=response,
            group=spec.sampling.group_size,
            weights_sent=weights.sent,
        ),
        longest_prompt_tokens=None if device is None else _longest(fits),
        fits=None if device is None else fits(prompt_tokens),
    )


def seconds(work: Work, ranks: Ranks, device: DeviceFigures) -> tuple[float, float] | None:
    """Return (computing, exchanging) seconds, one after the other without overlap; None where figures are missing."""
    if device.teraflops is None or (ranks.context > 1 and device.link_gb_per_second is None):
        return None
    computing = work.operations / (ranks.context * device.teraflops * 1e12 * device.utilisation)
    exchanging = 0.0 if device.link_gb_per_second is None else work.traffic / (device.link_gb_per_second * 1e9)
    return computing, exchanging


def _check_ranks(architecture: Architecture, ranks: Ranks) -> None:
    for layer in architecture.layers:
        mixer = layer.mixer
        if isinstance(mixer, GatedDelta) and mixer.value_heads % ranks.context:
            raise SpecError(
                f"--context-parallel {ranks.context} does not divide the {mixer.value_heads} value heads of the linear "
                "attention layers: choose a divisor"
            )
        if isinstance(mixer, GatedDelta) and mixer.key_heads % ranks.context and ranks.context % mixer.key_heads:
            raise SpecError(
                f"--context-parallel {ranks.context} neither divides the {mixer.key_heads} key heads of the linear "
                "attention layers nor is a multiple of them: choose another"
            )
        if isinstance(layer.network, Experts) and layer.network.experts % ranks.expert:
            raise SpecError(f"--expert-parallel {ranks.expert} does not divide {layer.network.experts} experts")
    if ranks.expert > 1 and not any(isinstance(layer.network, Experts) for layer in architecture.layers):
        raise SpecError(f"--expert-parallel {ranks.expert}: this model has no experts; choose 1")
    if ranks.context % ranks.expert:
        raise SpecError(f"--expert-parallel {ranks.expert} does not divide --context-parallel {ranks.context}")


def _fits(memory: RankMemory, device: DeviceFigures) -> bool:
    if memory.device > (device.memory_gb - device.reserved_gb) * 1e9:
        return False
    return not (memory.state_on_host and device.host_memory_gb and memory.state > device.host_memory_gb * 1e9)


def _longest(fits: Callable[[int], bool]) -> int:
    """Largest prompt length that fits, by bisection; 0 when not even one token does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

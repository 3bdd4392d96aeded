"""AdamW over the adapter's parameters, with gradient finalisation that refuses non-finite values first.

`AdapterOptimizer` is what an update asks of any optimizer; this one is for a single process, the one over several ranks
is `longstraw_core.training.distributed_optimizer`.
"""

import contextlib
from typing import Protocol

import torch

from longstraw_core.spec.errors import IntegrityError, NumericError
from longstraw_core.spec.transaction import OptimizerSpec
from longstraw_core.training.lora import trainable_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdapterOptimizer(Protocol):
    """Accumulates the gradients of many responses, finalises them once and takes one step."""

    parameters: dict[str, torch.nn.Parameter]
    """Trained tensors of this rank, by PEFT's state-dict names, sorted."""
    own: frozenset[str]
    """Names of those that other ranks do not have: shards of experts."""
    steps_taken: int

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        ...

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        ...

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Add the gradients of every backward in the body to what is there, without any exchange."""
        ...

    def finalise_gradients(self) -> float:
        """Sum over ranks, check and clip the accumulated gradients once; return their norm before clipping."""
        ...

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of one tensor; complete, and fp32, after `finalise_gradients`."""
        ...

    def step(self) -> None:
        """Take one step with the finalised gradients and drop them."""
        ...

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments as `exp_avg.<name>` and `exp_avg_sq.<name>`; empty before the first step."""
        ...

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], steps_taken: int) -> None:
        """Restore what `state_tensors` returned."""
        ...


def scheduled_rate(spec: OptimizerSpec, steps_taken: int) -> float:
    """Learning rate of the step after `steps_taken` steps: a linear rise over `warmup_steps`, then constant."""
    if steps_taken < spec.warmup_steps:
        return spec.learning_rate * (steps_taken + 1) / spec.warmup_steps
    return spec.learning_rate


def check_state_tensors(
    tensors: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter], steps_taken: int
) -> None:
    """Check that every moment of every parameter is there, and nothing else, with values that AdamW can leave.

    Raises:
        IntegrityError: a moment is missing, unexpected, has another shape, is not finite or, of squares, negative;
            names it.
    """
    expected = {f"{moment}.{name}" for name in parameters for moment in MOMENTS} if steps_taken > 0 else set()
    if set(tensors) != expected:
        name = sorted(set(tensors) ^ expected)[0]
        raise IntegrityError(f"optimizer state: {name} is {'unexpected' if name in tensors else 'missing'}")
    for key in sorted(expected):
        stored, parameter = tensors[key], parameters[key.split(".", 1)[1]]
        if stored.shape != parameter.shape or stored.dtype != parameter.dtype:
            raise IntegrityError(
                f"optimizer state {key}: stored as {tuple(stored.shape)} {stored.dtype}, "
                f"expected {tuple(parameter.shape)} {parameter.dtype}"
            )
        if not bool(torch.isfinite(stored).all()):
            raise IntegrityError(f"optimizer state {key} contains values that are not finite")
        if key.startswith("exp_avg_sq.") and bool((stored < 0).any()):
            raise IntegrityError(f"optimizer state {key} contains negative means of squares")


def adamw_state(tensors: dict[str, torch.Tensor], name: str, parameter: torch.nn.Parameter, steps_taken: int) -> dict:
    """Return torch's AdamW state of one parameter from its moments."""
    restored = {"step": torch.tensor(float(steps_taken), dtype=torch.float32)}
    return restored | {m: tensors[f"{m}.{name}"].to(parameter.device, copy=True) for m in MOMENTS}


class SingleProcessOptimizer:
    """One AdamW over all trained tensors, in the order of their names.

    Args:
        model: PEFT model; what requires a gradient is trained.
        spec: hyper-parameters. The learning rate rises linearly over `warmup_steps` steps, then stays.
    """

    def __init__(self, model: torch.nn.Module, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters = trainable_parameters(model)
        self.own: frozenset[str] = frozenset()
        self.steps_taken = 0
        self._adamw = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return scheduled_rate(self.spec, self.steps_taken)

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to prepare: autograd itself adds to `.grad`."""
        return contextlib.nullcontext()

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of one tensor, zeros where nothing arrived."""
        parameter = self.parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def finalise_gradients(self) -> float:
        """Check and clip the accumulated gradients once; return their norm before clipping, in all.

        A parameter that nothing reached gets a zero gradient, so that every parameter steps alike.

        Raises:
            NumericError: a gradient is not finite; names the parameter.
        """
        total = 0.0
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            squared = float(parameter.grad.double().pow(2).sum())
            if not torch.isfinite(torch.tensor(squared)):
                raise NumericError(f"gradient of {name} is not finite: no optimizer step was taken")
            total += squared
        norm = total**0.5
        limit = self.spec.max_gradient_norm
        if limit is not None:
            factor = min(1.0, limit / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_
            if factor < 1.0:
                for parameter in self.parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        return norm

    def step(self) -> None:
        """Take one AdamW step with the current learning rate and drop the gradients."""
        for parameter_group in self._adamw.param_groups:
            parameter_group["lr"] = self.learning_rate
        self._adamw.step()
        self.steps_taken += 1
        self.clear_gradients()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments as `exp_avg.<name>` and `exp_avg_sq.<name>`; empty before the first step."""
        tensors = {}
        for name, parameter in self.parameters.items():
            state = self._adamw.state.get(parameter)
            if state:
                for moment in MOMENTS:
                    tensors[f"{moment}.{name}"] = state[moment]
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], steps_taken: int) -> None:
        """Restore what `state_tensors` returned.

        Raises:
            IntegrityError: a moment is missing, unexpected or has another shape.
        """
        check_state_tensors(tensors, self.parameters, steps_taken)
        self.steps_taken = steps_taken
        self._adamw.state.clear()
        for name, parameter in self.parameters.items() if tensors else ():
            self._adamw.state[parameter] = adamw_state(tensors, name, parameter, steps_taken)

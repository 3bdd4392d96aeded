"""AdamW over the adapter's parameters, with gradient finalisation that refuses non-finite values first."""

import torch

from longstraw_core.spec.errors import IntegrityError, NumericError
from longstraw_core.spec.transaction import OptimizerSpec
from longstraw_core.training.lora import trainable_parameters

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdapterOptimizer:
    """One AdamW over all trained tensors, in the order of their names.

    Args:
        model: PEFT model; what requires a gradient is trained.
        spec: hyper-parameters. The learning rate rises linearly over `warmup_steps` steps, then stays.
    """

    def __init__(self, model: torch.nn.Module, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters = trainable_parameters(model)
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
        if self.steps_taken < self.spec.warmup_steps:
            return self.spec.learning_rate * (self.steps_taken + 1) / self.spec.warmup_steps
        return self.spec.learning_rate

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

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
                for moment in _MOMENTS:
                    tensors[f"{moment}.{name}"] = state[moment]
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], steps_taken: int) -> None:
        """Restore what `state_tensors` returned.

        Raises:
            IntegrityError: a moment is missing, unexpected or has another shape.
        """
        expected = {f"{moment}.{name}" for name in self.parameters for moment in _MOMENTS} if steps_taken > 0 else set()
        if set(tensors) != expected:
            name = sorted(set(tensors) ^ expected)[0]
            raise IntegrityError(f"optimizer state: {name} is {'unexpected' if name in tensors else 'missing'}")
        self.steps_taken = steps_taken
        self._adamw.state.clear()
        for name, parameter in self.parameters.items():
            if not expected:
                break
            restored: dict[str, torch.Tensor] = {"step": torch.tensor(float(steps_taken), dtype=torch.float32)}
            for moment in _MOMENTS:
                stored = tensors[f"{moment}.{name}"]
                if stored.shape != parameter.shape or stored.dtype != parameter.dtype:
                    raise IntegrityError(
                        f"optimizer state {moment}.{name}: stored as {tuple(stored.shape)} {stored.dtype}, "
                        f"expected {tuple(parameter.shape)} {parameter.dtype}"
                    )
                restored[moment] = stored.to(parameter.device, copy=True)
            self._adamw.state[parameter] = restored

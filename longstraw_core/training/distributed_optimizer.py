"""Gradient buffers, reduction, clipping, AdamW and its schedule over several ranks: all of it megatron-core's.

Importing this module imports megatron-core, which takes seconds: a single process does without it.

Every rank's local gradient is a part of one sum (each token is owned by exactly one rank), so that the reduction is the
plain sum over the context-parallel ranks. Hence `calculate_per_token_loss`: without it megatron-core would divide by
the number of ranks. A parameter of a routed expert is complete on the rank that holds the expert and is summed only
over the ranks that hold copies of it (`allreduce = False`, megatron-core's expert-data-parallel group).
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from longstraw_core.spec.errors import NumericError
from longstraw_core.spec.transaction import OptimizerSpec
from longstraw_core.training import cpu_megatron
from longstraw_core.training.lora import trainable_parameters
from longstraw_core.training.optimizer import MOMENTS, adamw_state, check_state_tensors, scheduled_rate
from longstraw_core.training.process_groups import Ranks

with warnings.catch_warnings():  # that its optional fast kernels are not installed
    warnings.simplefilter("ignore", UserWarning)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

_NEVER_DECAYS = 1 << 60


class _Adapter(MegatronModule):
    """The root that megatron-core reads parameters from; never called."""

    def __init__(self, config: TransformerConfig, model: torch.nn.Module) -> None:
        super().__init__(config=config)
        self.model = model


class MultiRankOptimizer:
    """The optimizer of an update over several ranks; the adapter's tensors must be equal on all of them.

    Args:
        model: PEFT model; what requires a gradient is trained.
        spec: hyper-parameters.
        ranks: this process among the others.
        own: names of expert tensors of which this rank holds a shard.
    """

    def __init__(
        self, model: torch.nn.Module, spec: OptimizerSpec, ranks: Ranks, *, own: frozenset[str] = frozenset()
    ) -> None:
        cpu_megatron.use_cpu()
        self.spec = spec
        self.parameters = trainable_parameters(model)
        self.steps_taken = 0
        self._ranks = ranks
        self.own = own
        for name in own:
            self.parameters[name].allreduce = False  # type: ignore[attr-defined]  # read by megatron-core
        # The sizes are required but unused: no layer of megatron-core is built.
        config = TransformerConfig(
            num_layers=1,
            hidden_size=1,
            num_attention_heads=1,
            context_parallel_size=ranks.size,
            calculate_per_token_loss=True,
        )
        collection = ranks.groups.collection
        self._buffers = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            _Adapter(config, model),
            pg_collection=collection,
        )
        self._optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.learning_rate,
                weight_decay=spec.weight_decay,
                adam_beta1=spec.beta1,
                adam_beta2=spec.beta2,
                adam_eps=spec.epsilon,
                clip_grad=0.0,  # clipped in finalise_gradients, between the reduction and the witnesses
            ),
            [self._buffers],
            use_gloo_process_groups=False,
        )
        self._schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=spec.learning_rate,
            min_lr=0.0,
            lr_warmup_steps=spec.warmup_steps,
            lr_decay_steps=_NEVER_DECAYS,
            lr_decay_style="constant",
            start_wd=spec.weight_decay,
            end_wd=spec.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return scheduled_rate(self.spec, self.steps_taken)

    def clear_gradients(self) -> None:
        """Zero the gradient buffers."""
        self._buffers.zero_grad_buffer()
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Every backward in the body adds to the fp32 buffers; nothing is exchanged."""
        with self._buffers.no_sync():
            yield

    def gradient(self, name: str) -> torch.Tensor:
        """Return the buffer of one tensor's gradient, fp32."""
        return self.parameters[name].main_grad  # type: ignore[attr-defined]  # set by megatron-core

    def finalise_gradients(self) -> float:
        """Sum over ranks, check and clip once; return the norm before clipping, equal on all ranks.

        Raises:
            NumericError: a gradient is not finite on some rank; every rank raises.
        """
        finalize_model_grads([self._buffers])
        broken = [name for name in self.parameters if not bool(torch.isfinite(self.gradient(name)).all())]
        if self._ranks.any(bool(broken)):
            name = broken[0] if broken else "an expert on another rank"
            raise NumericError(f"gradient of {name} is not finite: no optimizer step was taken")
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        limit = self.spec.max_gradient_norm
        if limit is not None and limit / (norm + 1e-6) < 1.0:  # torch.nn.utils.clip_grad_norm_
            self._buffers.scale_gradients(limit / (norm + 1e-6))
        return norm

    def step(self) -> None:
        """Take one AdamW step with the current learning rate and clear the gradients."""
        self._schedule.step(1)
        self._optimizer.step()
        self.steps_taken += 1
        self.clear_gradients()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's moments as `exp_avg.<name>` and `exp_avg_sq.<name>`; empty before the first step."""
        tensors = {}
        for name, parameter in self.parameters.items():
            state = self._state_holder(parameter).state.get(parameter)
            if state:
                tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], steps_taken: int) -> None:
        """Restore what `state_tensors` returned.

        Raises:
            IntegrityError: a moment is missing, unexpected or has another shape.
        """
        check_state_tensors(tensors, self.parameters, steps_taken)
        self.steps_taken = steps_taken
        self._schedule.num_steps = steps_taken
        self._schedule.step(0)
        for name, parameter in self.parameters.items():
            holder = self._state_holder(parameter)
            holder.state.pop(parameter, None)
            if tensors:
                holder.state[parameter] = adamw_state(tensors, name, parameter, steps_taken)

    def _state_holder(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The torch optimizer that steps `parameter`: experts have one of their own."""
        for chained in self._optimizer.chained_optimizers:
            if any(parameter is held for group in chained.optimizer.param_groups for held in group["params"]):
                return chained.optimizer
        raise AssertionError("every trained parameter belongs to one optimizer")

"""The optimizer for a number of ranks: torch's own for one process, megatron-core's for several."""

from peft import PeftModel

from longstraw_core.mixers.exchange.expert_shard import expert_parameters
from longstraw_core.spec.transaction import OptimizerSpec
from longstraw_core.training.lora import holds_expert_shard, trainable_parameters
from longstraw_core.training.optimizer import AdapterOptimizer, SingleProcessOptimizer
from longstraw_core.training.process_groups import Ranks


def make_optimizer(model: PeftModel, spec: OptimizerSpec, ranks: Ranks) -> AdapterOptimizer:
    """Return the optimizer of the adapter that `model` carries; megatron-core is imported for several ranks only."""
    if ranks.size == 1:
        return SingleProcessOptimizer(model, spec)
    from longstraw_core.training.distributed_optimizer import MultiRankOptimizer

    own = expert_parameters(trainable_parameters(model)) if holds_expert_shard(model) else frozenset[str]()
    return MultiRankOptimizer(model, spec, ranks, own=own)

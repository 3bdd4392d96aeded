"""A toy adapter whose loss is a sum over rows and over experts, and its update on one or several ranks."""

import json
from typing import Any

import torch
from torch import nn

from longstraw_core.spec.errors import NumericError
from longstraw_core.spec.transaction import OptimizerSpec
from longstraw_core.training.distributed_optimizer import MultiRankOptimizer
from longstraw_core.training.optimizer import AdapterOptimizer, SingleProcessOptimizer
from longstraw_core.training.process_groups import Ranks

SPEC = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, warmup_steps=3, max_gradient_norm=0.5)
STEPS, REPLAYS, ROWS, EXPERTS = 5, 3, 8, 4


class Experts(nn.Module):
    def __init__(self, held: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 6, generator=generator)[held.start : held.stop].clone())


class Block(nn.Module):
    def __init__(self, held: range) -> None:
        super().__init__()
        self.experts = Experts(held)


class Toy(nn.Module):
    """Frozen base, a shared low-rank pair and one vector per expert; expert e works on column e of the input."""

    def __init__(self, held: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        with torch.no_grad():
            self.base.weight.copy_(torch.randn(6, 6, generator=generator))
            self.base.bias.zero_()
        self.a = nn.Parameter(torch.randn(2, 6, generator=generator))
        self.b = nn.Parameter(torch.randn(6, 2, generator=generator))
        self.mlp = Block(held)


def rows(step: int) -> torch.Tensor:
    return torch.randn(REPLAYS, ROWS, 6, generator=torch.Generator().manual_seed(100 + step))


def owned_rows(rank: int, size: int) -> range:
    return range(rank * ROWS // size, (rank + 1) * ROWS // size)


def local_loss(toy: Toy, x: torch.Tensor, owned: range, held: range, expert_rows: range) -> torch.Tensor:
    """This rank's part of the sum: its rows for the shared part, all rows of its experts' group for its experts."""
    y = toy.base(x[owned.start : owned.stop]) + x[owned.start : owned.stop] @ toy.a.t() @ toy.b.t()
    mine = x[expert_rows.start : expert_rows.stop]
    experts = (toy.mlp.experts.weight[None] * mine[:, None]).sum(-1).tanh()
    scale = torch.arange(held.start + 1, held.stop + 1, dtype=torch.float32)
    return y.square().sum() / (ROWS * REPLAYS) + (experts.square() * scale).sum() / (ROWS * REPLAYS)


def update(toy: Toy, optimizer: AdapterOptimizer, step: int, owned: range, held: range, expert_rows: range) -> float:
    optimizer.clear_gradients()
    with optimizer.accumulating():
        for x in rows(step):
            local_loss(toy, x, owned, held, expert_rows).backward()
    norm = optimizer.finalise_gradients()
    optimizer.step()
    return norm


def alone() -> dict[str, Any]:
    """The same updates in one process, by torch's own AdamW and clipping."""
    toy = Toy(range(EXPERTS))
    optimizer = SingleProcessOptimizer(toy, SPEC)
    everything = range(ROWS), range(EXPERTS), range(ROWS)
    norms = [update(toy, optimizer, step, *everything) for step in range(STEPS)]
    return report(toy, optimizer, norms)


def report(toy: Toy, optimizer: AdapterOptimizer, norms: list[float]) -> dict[str, Any]:
    return {
        "norms": norms,
        "parameters": {name: value.detach().tolist() for name, value in optimizer.parameters.items()},
        "moments": {name: value.tolist() for name, value in optimizer.state_tensors().items()},
    }


def on_ranks(request: bytes, ranks: Ranks) -> bytes:
    """The updates over the ranks, stopped in the middle, saved and continued by a second optimizer."""
    size = ranks.experts.size
    held = range(ranks.experts.rank * EXPERTS // size, (ranks.experts.rank + 1) * EXPERTS // size)
    owned = owned_rows(ranks.rank, ranks.size)
    first = ranks.rank - ranks.experts.rank
    expert_rows = range(owned_rows(first, ranks.size).start, owned_rows(first + size - 1, ranks.size).stop)
    own = frozenset({"mlp.experts.weight"}) if size > 1 else frozenset[str]()
    toy = Toy(held)
    optimizer = MultiRankOptimizer(toy, SPEC, ranks, own=own)
    norms = [update(toy, optimizer, step, owned, held, expert_rows) for step in range(2)]
    saved = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    weights = {name: value.detach().clone() for name, value in optimizer.parameters.items()}
    rates = [optimizer.learning_rate]
    norms += [update(toy, optimizer, step, owned, held, expert_rows) for step in range(2, STEPS)]

    resumed = Toy(held)
    again = MultiRankOptimizer(resumed, SPEC, ranks, own=own)
    with torch.no_grad():
        for name, value in again.parameters.items():
            value.copy_(weights[name])
    again.load_state_tensors(saved, 2)
    rates.append(again.learning_rate)
    for step in range(2, STEPS):
        update(resumed, again, step, owned, held, expert_rows)
    equal = all(torch.equal(optimizer.parameters[name], again.parameters[name]) for name in again.parameters)
    facts = {"resumed_equal": equal, "rates": rates, "refusal": refusal(toy, optimizer, ranks)}
    return json.dumps(report(resumed, again, norms) | facts).encode()


def refusal(toy: Toy, optimizer: MultiRankOptimizer, ranks: Ranks) -> str:
    """What a rank says to an infinite gradient of an expert on rank 1."""
    optimizer.clear_gradients()
    with optimizer.accumulating():
        (toy.mlp.experts.weight.sum() * (float("inf") if ranks.rank == 1 else 1.0)).backward()
    try:
        optimizer.finalise_gradients()
    except NumericError as error:
        return str(error)
    return "accepted"

"""Faults that a gradient over ranks can have without looking wrong: each must be far beyond the tolerance.

Every fault is put into the engine on two ranks; the same case without it is within 1e-4.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
from peft import PeftModel

from longstraw_core.mixers import attention_routes, latent_routes
from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.partials import row_sums
from longstraw_core.mixers.selected_attention import SelectedGradient, SelectedRows
from longstraw_core.resident.latent_state import LatentState
from longstraw_core.resident.paged_keys_values import PagedKeysValues, PrefixTile
from longstraw_core.resident.recurrent_state import RecurrentState
from tests.engine import glm_oracle, oracle
from tests.engine.parallel.cases import Case, read_result, run_cases
from tests.ranks import run_on_ranks

FAR = 1e-2
"""A hundred times the tolerance."""

Fault = contextlib.AbstractContextManager[Any]


def _unsummed_query_gradients() -> Fault:
    """Every query's owner takes only the part of dQ that its own keys gave."""
    to_owners = Exchange.to_owners

    def own_part_only(self: Exchange, partials: torch.Tensor, counts: Any, what: str) -> torch.Tensor:
        arrived = to_owners(self, partials, counts, what)
        if what == "partial query gradients":
            arrived = arrived * (torch.arange(self.group.size) == self.group.rank).view(-1, *[1] * (arrived.dim() - 1))
        return arrived

    return patch.object(Exchange, "to_owners", own_part_only)


def _local_log_sum_exp() -> Fault:
    """The gradient of a rank's keys uses its own output and log-sum-exp instead of the merged ones."""
    attend, gradient = attention_routes.attend, attention_routes.attend_gradient

    def local(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Iterable[PrefixTile],
        lse: torch.Tensor,
        delta: torch.Tensor,
        **places: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        del lse, delta
        tiles = list(tiles)
        out, own_lse = attend(q, k, v, tiles, **places)
        return gradient(dout, q, k, v, tiles, own_lse.nan_to_num(neginf=0.0), row_sums(dout, out), **places)

    return patch.object(attention_routes, "attend_gradient", local)


def _masked_by_local_index() -> Fault:
    """Causality compares places within a rank's own tokens instead of positions."""
    attend, gradient = attention_routes.attend, attention_routes.attend_gradient

    def without_places(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, first_query, first_key, scale: function(
            *arguments, first_query=0, first_key=0, scale=scale
        )

    return patch.multiple(attention_routes, attend=without_places(attend), attend_gradient=without_places(gradient))


def _zero_gradients(state: type) -> Fault:
    """What later tokens sent back to this kind of state is forgotten."""
    take = state.take_gradients

    def nothing(self: Any, start: int, end: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(gradient) for gradient in take(self, start, end))

    return patch.object(state, "take_gradients", nothing)


def _local_log_sum_exp_of_rows() -> Fault:
    """The same fault as `_local_log_sum_exp` in sparse attention."""
    attend, gradient = latent_routes.attend_selected, latent_routes.attend_selected_gradient

    def local(
        inputs: SelectedRows, dout: torch.Tensor, dout_prefix: torch.Tensor | None, sink: torch.Tensor | None, **_: Any
    ) -> SelectedGradient:
        out, _out_prefix, lse = attend(inputs)
        return gradient(inputs, dout, dout_prefix, sink, lse_TN=lse, delta_TN=row_sums(dout, out))

    return patch.object(latent_routes, "attend_selected_gradient", local)


def _rows_masked_by_local_index() -> Fault:
    """A query that sees all rows up to its own counts them by its place among this rank's own tokens."""
    rows = latent_routes.SelectedRows
    return patch.object(
        latent_routes, "SelectedRows", lambda *given, first_query, **named: rows(*given, first_query=0, **named)
    )


def _unsummed_expert_tokens() -> Fault:
    """Results of experts on other ranks are lost."""
    from longstraw_core.mixers import routed_experts

    exchanged = routed_experts.exchanged_rows

    def only_own(x: torch.Tensor, exchange: Exchange, send: Any, receive: Any, what: str) -> torch.Tensor:
        arrived = exchanged(x, exchange, send, receive, what)
        if what == "experts to tokens":
            rank = torch.arange(exchange.group.size).repeat_interleave(torch.tensor(receive))
            arrived = arrived * (rank == exchange.group.rank)[:, None]
        return arrived

    return patch.object(routed_experts, "exchanged_rows", only_own)


HYBRID: dict[str, Callable[[], Fault]] = {
    "none": contextlib.nullcontext,
    "unsummed dQ": _unsummed_query_gradients,
    "local log-sum-exp": _local_log_sum_exp,
    "mask by local index": _masked_by_local_index,
    "dropped page sink": lambda: _zero_gradients(PagedKeysValues),
    "dropped state gradient": lambda: _zero_gradients(RecurrentState),
}
GLM: dict[str, Callable[[], Fault]] = {
    "none": contextlib.nullcontext,
    "unsummed dQ": _unsummed_query_gradients,
    "local log-sum-exp": _local_log_sum_exp_of_rows,
    "mask by local index": _rows_masked_by_local_index,
    "dropped page sink": lambda: _zero_gradients(LatentState),
    "lost expert results": _unsummed_expert_tokens,
}


def _case(family: str, fault: str) -> Case:
    name = f"{family}, {fault}".replace(" ", "-")
    # rows that visit queries are masked by position; where queries visit rows, each brings a list of its own
    travels = "keys" if (family, fault) == ("glm", "mask by local index") else "queries"
    return Case(name, 101, (17, 5), 40, "exact", 2, travels, experts=2 if family == "glm" else 1)


def _run(rank: int, folder: str) -> None:
    families: list[tuple[str, PeftModel, dict[str, Callable[[], Fault]]]] = [
        ("hybrid", oracle.tiny_policy_model(), HYBRID),
        ("glm", glm_oracle.tiny_policy_model(), GLM),
    ]
    for family, model, faults in families:
        for name, fault in faults.items():
            with fault():
                run_cases(rank, model, [_case(family, name)], folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(2, _run, str(folder), directory=folder / "run")
    return folder


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, torch.Tensor]]:
    batch = _case("hybrid", "none").batch
    return {
        "hybrid": oracle.full_gradients(oracle.tiny_policy_model(), batch),
        "glm": oracle.full_gradients(glm_oracle.tiny_policy_model(), batch),
    }


def _worst_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    try:
        return oracle.worst_relative_error(ours, reference)
    except AssertionError:  # a gradient where there is none
        return float("inf")


@pytest.mark.parametrize(
    ("family", "fault"), [*(("hybrid", fault) for fault in HYBRID), *(("glm", fault) for fault in GLM)]
)
def test_the_worst_parameter_tells_a_fault_from_a_sound_engine(
    family: str, fault: str, results: Path, references: dict[str, dict[str, torch.Tensor]]
) -> None:
    ours, _ = read_result(results, _case(family, fault))
    error = _worst_error(ours, references[family])
    if fault == "none":
        assert error <= 1e-4
    else:
        assert not error <= FAR

"""Layers' weights in shares over ranks: the same bits as whole ones, 1/CP of the bytes, and traffic by the formula."""

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file

from longstraw_core.mixers.exchange.expert_shard import is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.exchange.volume import gathered_weights
from longstraw_core.mixers.layer_weights import FlatLayout, frozen_matrices, share_loaded_layers
from tests.engine import glm_oracle, oracle
from tests.engine.parallel.cases import Case, engine_gradients
from tests.ranks import run_on_ranks

RANKS = 4
FAMILIES: dict[str, Any] = {"hybrid": oracle, "glm": glm_oracle}
EXPERT_RANKS = {"hybrid": 1, "glm": 4}
CASES = [
    Case(f"{family}-{recompute}", 127, (17, 1, 3), 50, "exact", RANKS, checkpoint_layers=recompute, experts=experts)
    for family in FAMILIES
    for recompute in (False, True)
    for experts in sorted({1, EXPERT_RANKS[family]})
]


def _live_bytes() -> int:
    """Memory of all tensors of the process."""
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if isinstance(item, torch.Tensor) and not item.is_meta
    }
    return sum(storages.values())


def _name(case: Case, weights: str, rank: int) -> str:
    return f"{case.name}-{case.experts}-{weights}-{rank}"


def _run(rank: int, folder: str) -> None:
    group = RankGroup.of(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    for case in CASES:
        family = case.name.split("-")[0]
        for weights in ("replicated", "sharded"):
            before = _live_bytes()
            model = FAMILIES[family].tiny_policy_model()
            if weights == "sharded":
                share_loaded_layers(model.get_base_model(), group, experts_divided=case.experts > 1)
            experts = group if case.experts > 1 else ALONE
            gradients, logprobs, measured = engine_gradients(model, case, group, experts)
            model.zero_grad(set_to_none=True)
            name = _name(case, weights, rank)
            results = gradients | {f"logprobs.{number}": value for number, value in enumerate(logprobs)}
            save_file({key: value.contiguous() for key, value in results.items()}, Path(folder, name))
            sent = [item for item in measured.sent if item[2] == "weights"]
            del gradients, logprobs, results, measured
            Path(folder, f"{name}.json").write_text(json.dumps({"resident": _live_bytes() - before, "sent": sent}))
            del model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(RANKS, _run, str(folder), directory=folder / "run", seconds=600.0)
    return folder


def _matrix_shapes(case: Case) -> list[list[tuple[int, ...]]]:
    """Shapes of every layer's matrices that are kept in shares."""
    model = FAMILIES[case.name.split("-")[0]].tiny_base()
    matrices = [
        {
            name: parameter
            for name, parameter in frozen_matrices(layer, dtype=torch.float32, quantised=False).items()
            if case.experts == 1 or not is_expert_parameter(name)
        }
        for layer in model.model.layers
    ]
    return [[tuple(parameter.shape) for parameter in layer.values()] for layer in matrices]


def _matrix_bytes(case: Case) -> list[int]:
    return [sum(4 * torch.Size(shape).numel() for shape in shapes) for shapes in _matrix_shapes(case)]


def _case_id(case: Case) -> str:
    return f"{case.name}-{case.experts}"


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_gradients_and_log_probabilities_are_the_same_bits(case: Case, results: Path) -> None:
    for rank in range(RANKS):
        whole, shared = (load_file(results / _name(case, weights, rank)) for weights in ("replicated", "sharded"))
        assert whole.keys() == shared.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, shared[name]), name


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_a_rank_holds_its_share_and_one_layer(case: Case, results: Path) -> None:
    layers = _matrix_bytes(case)
    for rank in range(RANKS):
        whole, shared = (
            json.loads((results / f"{_name(case, weights, rank)}.json").read_text())["resident"]
            for weights in ("replicated", "sharded")
        )
        others = whole - sum(layers)  # adapter, embedding, head, vectors; divided experts
        padding = sum(64 * 4 * (len(shapes) + RANKS) for shapes in _matrix_shapes(case))
        assert shared - others <= sum(layers) / RANKS + max(layers) + padding
        assert shared < whole


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_what_is_sent_follows_from_the_order_in_which_layers_are_used(case: Case, results: Path) -> None:
    count = len(_matrix_bytes(case))
    forward, backward = list(range(count)), list(reversed(range(count)))
    chunks = -(-(case.prompt - 1) // case.chunk)
    order = [
        *(("capture", layer) for layer in forward * chunks),
        *(("replay", layer) for layer in (forward + backward) * len(case.responses)),
        *(("reverse_sweep", layer) for layer in (forward + backward) * chunks),
    ]
    gathers = Counter(use for before, use in zip([("", -1), *order], order, strict=False) if before[1] != use[1])
    shares = [FlatLayout.of(shapes, RANKS).share * 4 for shapes in _matrix_shapes(case)]
    for rank in range(RANKS):
        sent = json.loads((results / f"{_name(case, 'sharded', rank)}.json").read_text())["sent"]
        expected = {use: times * gathered_weights(shares[use[1]], RANKS) for use, times in gathers.items()}
        assert {(phase, layer): size for phase, layer, _, size in sent} == expected

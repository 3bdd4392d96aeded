"""Index queries and keys of small integers: scores are exact in any order of summation, and most of them tie."""

from pathlib import Path

import torch
import torch.distributed
from safetensors.torch import save_file

from longstraw_core.mixers import index_exchange
from longstraw_core.mixers.exchange.collectives import Exchange
from longstraw_core.mixers.exchange.ownership import PromptOwnership, SegmentOwnership
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.mixers.exchange.traffic import TrafficMeter
from longstraw_core.mixers.index_selection import IndexInputs

TOP_K = 12
SEGMENTS = {"first chunk": (0, 40), "later chunk": (80, 40), "response": (110, 7), "one token": (110, 1)}
"""Start and tokens; the prompt has 110 captured tokens in chunks of 40."""
WAYS = ("queries", "keys")


def segment(name: str, rank: int = 0, ranks: int = 1) -> SegmentOwnership:
    """One of `SEGMENTS`, dealt."""
    prompt = PromptOwnership.chunked(110, 40, rank=rank, ranks=ranks)
    start, tokens = SEGMENTS[name]
    return SegmentOwnership(prompt, start, min(tokens, 110 - start) if start < 110 else tokens)


def inputs(dealt: SegmentOwnership) -> IndexInputs:
    """This rank's part of the same integers on every rank."""
    generator = torch.Generator().manual_seed(dealt.start)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    q_TNI, w_TN = integers(dealt.tokens, 2, 4), integers(dealt.tokens, 2)
    keys_TI = integers(dealt.start + dealt.tokens, 4)
    own = slice(dealt.first, dealt.first + dealt.length)
    return IndexInputs(q_TNI[dealt.owned], w_TN[dealt.owned], keys_TI[dealt.resident_positions], keys_TI[own], 1.0)


def select_on_rank(rank: int, folder: str) -> None:
    """Select in both ways; write what this rank's queries selected and what was selected of its rows."""
    world = torch.distributed.get_world_size()
    exchange = Exchange(RankGroup.of(torch.distributed.group.WORLD), TrafficMeter(), 0)
    found: dict[str, torch.Tensor] = {}
    choose = index_exchange.index_travels
    for way in WAYS:
        index_exchange.index_travels = lambda *_, way=way: way
        for name in SEGMENTS:
            dealt = segment(name, rank, world)
            selected = index_exchange.select_across_ranks(inputs(dealt), dealt, exchange, top_k=TOP_K)
            found[f"{way}.{name}.positions"] = selected.positions_SK
            found[f"{way}.{name}.cut"] = selected.cut.positions_S.to(torch.int64)
            if selected.rows_XW is not None:
                found[f"{way}.{name}.rows"] = selected.rows_XW
    index_exchange.index_travels = choose
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, Path(folder) / f"ties.{rank}.safetensors")

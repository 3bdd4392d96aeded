"""Latent pages and recorded choices: order, ownership, staging without a copy, and files that must be refused."""

from dataclasses import replace

import pytest
import torch

from longstraw_core.resident.latent_state import ChoiceLayout, LatentLayout, LatentState
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.page_run import RowLayout
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.resident.staging import Stager
from longstraw_core.spec.errors import IntegrityError

LAYOUT = LatentLayout(
    latents=RowLayout(page_tokens=4, width=3, dtype=torch.float32),
    index_keys=RowLayout(page_tokens=4, width=2, dtype=torch.float32),
    choices=ChoiceLayout(selected=5, experts=2, expert_count=8, selection_record="positions"),
)
CUTS = replace(LAYOUT, choices=replace(LAYOUT.choices, selection_record="cut"))
TOKENS = 11


def empty_state(
    pool: ResidentPool | None = None, tokens: int = TOKENS, *, layout: LatentLayout = LAYOUT
) -> LatentState:
    cpu = torch.device("cpu")
    return LatentState(
        pool or ResidentPool(cpu, 1 << 20), "layer 0", layout, PromptOwnership.whole(tokens), Stager(cpu)
    )


def filled_state(pool: ResidentPool | None = None, *, layout: LatentLayout = LAYOUT) -> LatentState:
    state = empty_state(pool, layout=layout)
    rows = torch.arange(TOKENS * 3, dtype=torch.float32).view(TOKENS, 3)
    keys = -torch.arange(TOKENS * 2, dtype=torch.float32).view(TOKENS, 2)
    for begin, end in ((0, 1), (1, 9), (9, TOKENS)):
        state.append((rows[begin:end], keys[begin:end]), end - begin, keep_boundary=True)
    for begin, end in ((0, 7), (7, TOKENS)):
        selecting = torch.arange(max(begin, 5), end)
        state.record_choice("selection", max(begin, 5), selecting[:, None] - torch.arange(5).flip(0))
        state.record_choice("cut_scores", max(begin, 5), selecting[:, None] / 8)
        state.record_choice("cut_positions", max(begin, 5), selecting[:, None].to(torch.int32) - 4)
        state.record_choice(
            "experts", begin, torch.arange(begin, end)[:, None] % 8 + torch.zeros(1, 2, dtype=torch.long)
        )
    return state


def test_rows_keep_their_order_across_pages_and_are_read_without_a_copy() -> None:
    state = filled_state()
    rows = state.latents(10, backward=False)
    assert torch.equal(rows, torch.arange(30, dtype=torch.float32).view(10, 3))
    assert torch.equal(state.index_keys(TOKENS)[-1], torch.tensor([-20.0, -21.0]))
    first_page = dict(state.blocks())["latent page 0"]
    assert rows.data_ptr() == first_page.data_ptr()


def test_pages_take_exactly_the_bytes_their_layout_says_and_are_returned() -> None:
    pool = ResidentPool(torch.device("cpu"), 1 << 20)
    state = filled_state(pool)
    pages = LAYOUT.latents.bytes_for(TOKENS) + 3 * 4 * 2 * 4
    assert (
        pool.used_bytes
        == pages + LAYOUT.choices.bytes_for(PromptOwnership.whole(TOKENS))
        == pages + 6 * 5 * 2 + TOKENS * 2
    )
    state.open_sinks()
    assert pool.used_bytes == pages + LAYOUT.choices.bytes_for(
        PromptOwnership.whole(TOKENS)
    ) + LAYOUT.latents.sink_bytes_for(TOKENS)
    state.close_sinks()
    pool.release("layer 0")
    assert pool.used_bytes == 0


def test_more_tokens_than_announced_are_refused() -> None:
    state = filled_state()
    with pytest.raises(RuntimeError, match="12 tokens do not fit pages for 11"):
        state.append((torch.zeros(1, 3), torch.zeros(1, 2)), 1, keep_boundary=False)


def test_choices_come_back_for_any_range() -> None:
    state = filled_state()
    assert state.recorded_choice("selection", 0, 5).shape == (0, 5)
    assert state.recorded_choice("selection", 4, 8).tolist() == [list(range(row - 4, row + 1)) for row in (5, 6, 7)]
    assert state.recorded_choice("experts", 8, 10).tolist() == [[0, 0], [1, 1]]


def test_cuts_take_eight_bytes_per_selecting_token_and_come_back_for_any_range() -> None:
    pool = ResidentPool(torch.device("cpu"), 1 << 20)
    state = filled_state(pool, layout=CUTS)
    assert CUTS.choices.bytes_for(PromptOwnership.whole(TOKENS)) == 6 * 8 + TOKENS * 2
    assert pool.used_bytes == LAYOUT.latents.bytes_for(TOKENS) + 3 * 4 * 2 * 4 + CUTS.choices.bytes_for(
        PromptOwnership.whole(TOKENS)
    )
    assert state.recorded_choice("cut_scores", 0, 5).shape == (0, 1)
    assert state.recorded_choice("cut_scores", 4, 7).flatten().tolist() == [5 / 8, 6 / 8]
    positions = state.recorded_choice("cut_positions", 6, TOKENS)
    assert (positions.flatten().tolist(), positions.dtype) == ([2, 3, 4, 5, 6], torch.int64)
    assert not state.records("selection")


def test_long_prompts_record_positions_in_32_bits() -> None:
    assert LAYOUT.choices.shapes_for(PromptOwnership.whole(1 << 16))["selection"][1] == torch.uint16
    assert LAYOUT.choices.shapes_for(PromptOwnership.whole((1 << 16) + 1))["selection"][1] == torch.int32


@pytest.mark.parametrize("layout", [LAYOUT, CUTS])
def test_restore_gives_the_exported_state(layout: LatentLayout) -> None:
    exported = {name: tensor.clone() for name, tensor in filled_state(layout=layout).export().items()}
    restored = empty_state(layout=layout)
    restored.restore(exported, PromptOwnership.whole(TOKENS))
    again = restored.export()
    assert again.keys() == exported.keys()
    assert all(torch.equal(again[name], exported[name]) for name in exported)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("latents.000001", None, "latents.000001"),
        ("selection", None, "selection"),
        ("latents.000001", torch.zeros(4, 4), r"latents.000001: stored as \(4, 4\)"),
        ("experts", torch.zeros(TOKENS, 2, dtype=torch.int32), "experts: stored as"),
        ("experts", torch.full((TOKENS, 2), 8, dtype=torch.uint8), "experts: names a token or an expert"),
        ("selection", torch.full((6, 5), 10, dtype=torch.uint16), "selection: names a token or an expert"),
        ("cut_scores", torch.full((6, 1), torch.nan), "cut_scores: contains a score that is not finite"),
        ("cut_positions", torch.full((6, 1), 10, dtype=torch.int32), "cut_positions: names a token"),
        ("cut_positions", None, "cut_positions"),
        ("stranger", torch.zeros(1), "stranger"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: torch.Tensor | None, message: str) -> None:
    layout = CUTS if name.startswith("cut") else LAYOUT
    exported = filled_state(layout=layout).export()
    if value is None:
        del exported[name]
    else:
        exported[name] = value
    with pytest.raises(IntegrityError, match=message):
        empty_state(layout=layout).restore(exported, PromptOwnership.whole(TOKENS))


def test_a_state_that_recorded_selections_otherwise_is_refused() -> None:
    with pytest.raises(IntegrityError, match="cut_positions"):
        empty_state(layout=LAYOUT).restore(filled_state(layout=CUTS).export(), PromptOwnership.whole(TOKENS))

"""Pages, recurrent state, pool and witness: ownership, capacity, and what a violated witness says."""

from pathlib import Path

import pytest
import torch

from longstraw_core.resident import free_memory
from longstraw_core.resident.layer_state import LayerState
from longstraw_core.resident.paged_keys_values import PagedKeysValues, PageLayout
from longstraw_core.resident.pool import ResidentPool, block_bytes
from longstraw_core.resident.prefix_state import PrefixState
from longstraw_core.resident.recurrent_state import RecurrentLayout, RecurrentState
from longstraw_core.spec.errors import IntegrityError, SpecError

PAGES = PageLayout(page_tokens=4, heads=2, head_dim=3, dtype=torch.float32)
RECURRENT = RecurrentLayout(value_heads=2, key_dim=3, value_dim=4, channels=5, kernel=4, dtype=torch.float32)


def pool(capacity: int = 1 << 20) -> ResidentPool:
    return ResidentPool(torch.device("cpu"), capacity)


def make_layers(from_pool: ResidentPool, owner: str) -> list[LayerState]:
    return [
        PagedKeysValues(from_pool, f"{owner}/layer 0", PAGES),
        RecurrentState(from_pool, f"{owner}/layer 1", RECURRENT),
    ]


def filled_state(from_pool: ResidentPool, tokens: int = 10) -> PrefixState:
    state = PrefixState(from_pool, range(tokens + 1), make_layers)
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, tokens, 6):
        count = min(6, tokens - begin)
        keys_values = tuple(torch.randn(count, 2, 3, generator=generator) for _ in range(2))
        state.append(0, keys_values, count, keep_boundary=True)
        recurrent = (torch.randn(2, 3, 4, generator=generator), torch.randn(5, 3, generator=generator))
        state.append(1, recurrent, count, keep_boundary=True)
        state.chunk_starts.append(begin)
    return state


def test_a_pool_says_what_was_asked_and_what_is_free() -> None:
    small = pool(1000)
    small.allocate("a", (100,), torch.float32)
    with pytest.raises(SpecError, match=r"b needs 800 bytes of resident state, 600 of 1,000 are free"):
        small.allocate("b", (200,), torch.float32)
    assert small.used_bytes == 400
    small.release("a")
    assert small.free_bytes == 1000
    assert small.allocate("b", (200,), torch.float32).shape == (200,)


def test_a_returned_block_is_handed_out_again_and_zeroed() -> None:
    from_pool = pool()
    block = from_pool.allocate("a", (4,), torch.float32)
    block.fill_(7.0)
    from_pool.release("a")
    again = from_pool.allocate("b", (4,), torch.float32)
    assert again.data_ptr() == block.data_ptr()
    assert not again.any()


def test_capacity_defaults_to_what_is_free_within_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    assert 0 < ResidentPool(torch.device("cpu")).capacity_bytes < 1 << 50
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 600\n")
    assert ResidentPool(torch.device("cpu")).capacity_bytes == 1600


def test_releasing_what_one_does_not_own_is_an_error() -> None:
    with pytest.raises(KeyError):
        pool().release("nobody")


def test_pages_keep_tokens_in_order_across_uneven_appends() -> None:
    store = PagedKeysValues(pool(), "layer", PAGES)
    k = torch.arange(11 * 6, dtype=torch.float32).view(11, 2, 3)
    for begin, end in ((0, 1), (1, 9), (9, 11)):
        store.append((k[begin:end], -k[begin:end]), end - begin, keep_boundary=False)
    tiles = list(store.prefix(10, with_gradient=False).tiles())
    assert [tile.k_KTD.shape[1] for tile in tiles] == [4, 4, 2]
    assert torch.equal(torch.cat([tile.k_KTD for tile in tiles], 1).transpose(0, 1), k[:10])
    assert torch.equal(torch.cat([tile.v_KTD for tile in tiles], 1).transpose(0, 1), -k[:10])
    assert PAGES.bytes_for(11) == 3 * block_bytes((2, 2, 4, 3), torch.float32)


def test_recurrent_state_keeps_boundaries_only_when_asked() -> None:
    for keep, expected in ((True, [3, 6, 9]), (False, [9])):
        store = RecurrentState(pool(), "layer", RECURRENT)
        for step in range(3):
            store.append((torch.full((2, 3, 4), step), torch.full((5, 3), step)), 3, keep_boundary=keep)
        assert sorted({int(name.split()[3]) for name, _ in store.blocks() if "recurrent" in name}) == expected
        assert float(store.prefix(9, with_gradient=False).state_VKD[0, 0, 0]) == 2.0
        assert not store.prefix(0, with_gradient=False).state_VKD.any()


def test_release_returns_every_byte() -> None:
    from_pool = pool()
    state = filled_state(from_pool)
    state.open_sinks()
    assert from_pool.used_bytes > 0
    state.release()
    state.release()
    assert from_pool.used_bytes == 0


def test_an_untouched_state_passes_its_witness() -> None:
    state = filled_state(pool())
    state.record_witness()
    state.open_sinks()
    state.verify_witness()


def test_writing_a_page_violates_the_witness_and_names_layer_and_page() -> None:
    state = filled_state(pool())
    state.record_witness()
    dict(state.layers[0].blocks())["page 1"][0, 0, 0, 0] += 1.0
    with pytest.raises(IntegrityError, match=r"layer 0, page 1: was written during replay"):
        state.verify_witness()


def test_replacing_a_page_violates_the_witness() -> None:
    state = filled_state(pool())
    state.record_witness()
    layer = state.layers[0]
    assert isinstance(layer, PagedKeysValues)
    layer._pages[2] = layer._pages[2].clone()
    with pytest.raises(IntegrityError, match=r"layer 0, page 2: was moved or replaced"):
        state.verify_witness()


def test_writing_the_recurrent_state_violates_the_witness() -> None:
    state = filled_state(pool())
    state.record_witness()
    dict(state.layers[1].blocks())["recurrent state after 10 tokens"].mul_(1.0)
    with pytest.raises(IntegrityError, match=r"layer 1, recurrent state after 10 tokens: was written"):
        state.verify_witness()


def test_a_response_left_in_the_pages_violates_the_witness() -> None:
    state = filled_state(pool())
    state.record_witness()
    state.append(0, (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)), 1, keep_boundary=False)
    with pytest.raises(IntegrityError, match=r"layer 0: holds 11 tokens, 10 were recorded"):
        state.verify_witness()

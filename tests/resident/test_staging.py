"""Which rows are brought ahead of time: the next layer's in forward, the previous layer's in backward, no others."""

import torch

from longstraw_core.resident.latent_state import LatentState
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.resident.staging import Key, Stager
from tests.resident.test_latent_state import LAYOUT, TOKENS


class RecordingStager(Stager):
    """Notes what is asked for and hands out copies, as a device would."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.ahead: list[set[Key]] = []

    def prefetch(self, rows: dict[Key, torch.Tensor]) -> None:
        self.ahead.append(set(rows))


def three_layers(stager: Stager) -> list[LatentState]:
    pool = ResidentPool(torch.device("cpu"), 1 << 20)
    states = [LatentState(pool, f"layer {index}", LAYOUT, PromptOwnership.whole(TOKENS), stager) for index in range(3)]
    for index, state in enumerate(states):
        state.following = states[index + 1] if index < 2 else None
        state.preceding = states[index - 1] if index else None
        state.append((torch.ones(TOKENS, 3), torch.ones(TOKENS, 2)), TOKENS, keep_boundary=False)
    return states


def test_forward_brings_the_next_layers_rows_and_index_keys() -> None:
    stager = RecordingStager()
    states = three_layers(stager)
    states[0].latents(7, backward=False)
    states[2].latents(7, backward=False)
    assert stager.ahead == [{("layer 1", "latents", 7), ("layer 1", "index keys", 7)}]


def test_backward_brings_the_previous_layers_rows_only() -> None:
    stager = RecordingStager()
    states = three_layers(stager)
    states[2].latents(7, backward=True)
    states[0].latents(7, backward=True)
    assert stager.ahead == [{("layer 1", "latents", 7)}]


def test_an_empty_prefix_brings_nothing() -> None:
    stager = RecordingStager()
    three_layers(stager)[0].latents(0, backward=False)
    assert stager.ahead == []

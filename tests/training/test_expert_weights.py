"""Shared experts: every rank reads its own and everything else, and host memory stays near the rank's share."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from longstraw_core.mixers.exchange.expert_shard import is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.training.expert_weights import load_held_weights
from tests.engine.glm_oracle import tiny_base


def place(rank: int, size: int) -> RankGroup:
    """A place in a group that nothing is exchanged with."""
    return RankGroup(rank, size, cast(Any, object()))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm") / "model"
    tiny_base().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_holds_its_experts_and_all_other_tensors_bit_for_bit(snapshot: Path, rank: int) -> None:
    whole = dict(tiny_base().state_dict())
    config = AutoConfig.from_pretrained(snapshot)
    model = load_held_weights(snapshot, config, dtype=torch.float32, device="cpu", experts=place(rank, 4))
    loaded = dict(model.state_dict())
    assert loaded.keys() == whole.keys()
    share = config.n_routed_experts // 4
    sharded = 0
    for name, tensor in whole.items():
        expected = tensor
        if is_expert_parameter(name):
            expected = tensor[rank * share : (rank + 1) * share]
            sharded += 1
        assert torch.equal(loaded[name], expected), name
    assert sharded
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())


def test_a_missing_expert_is_refused_only_by_the_rank_that_holds_it(snapshot: Path, tmp_path: Path) -> None:
    tensors = load_file(snapshot / "model.safetensors")
    gone = next(name for name in sorted(tensors) if ".experts.0." in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((snapshot / "config.json").read_bytes())
    config = AutoConfig.from_pretrained(snapshot)
    load_held_weights(tmp_path, config, dtype=torch.float32, device="cpu", experts=place(1, 2))
    with pytest.raises(IntegrityError, match="lacks tensor"):
        load_held_weights(tmp_path, config, dtype=torch.float32, device="cpu", experts=place(0, 2))


MEASURE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig
from longstraw_core.training.expert_weights import load_held_weights
from tests.engine.glm_oracle import tiny_base
from tests.training.test_expert_weights import place

tiny_base()  # what importing and building a model costs once is not the weights'
snapshot = Path(sys.argv[1])
config = AutoConfig.from_pretrained(snapshot)

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = resident("VmRSS")
model = load_held_weights(snapshot, config, dtype=torch.float32, device="cpu", experts=place(1, 4))
share = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
print(json.dumps({"peak": resident("VmHWM") - before, "share": share}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
def test_peak_host_memory_is_at_most_a_fifth_above_the_rank_s_share(tmp_path: Path) -> None:
    fields = tiny_base().config.to_dict() | {"hidden_size": 256, "moe_intermediate_size": 768, "n_routed_experts": 32}
    GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields)).save_pretrained(tmp_path / "model")
    total = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    measured = json.loads(answer.stdout.splitlines()[-1])
    assert measured["share"] < total / 3
    assert measured["peak"] <= 1.2 * measured["share"], measured

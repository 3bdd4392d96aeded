"""Loading weights: as transformers loads them, of experts only a rank's own, and host memory near the rank's share."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw_core.mixers.exchange.expert_shard import is_expert_parameter
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.training import weight_files
from longstraw_core.training.base_weights import Keeping, load_weights
from tests.engine import glm_oracle, oracle


def place(rank: int, size: int) -> RankGroup:
    """A place in a group that nothing is exchanged with."""
    return RankGroup(rank, size, cast(Any, object()))


def load(
    snapshot: Path, experts: RankGroup = ALONE, dtype: torch.dtype = torch.float32, keeping: Keeping | None = None
) -> Any:
    config = AutoConfig.from_pretrained(snapshot)
    return load_weights(snapshot, config, dtype=dtype, device="cpu", experts=experts, keeping=keeping)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("snapshots")
    glm_oracle.tiny_base().save_pretrained(directory / "glm")
    oracle.tiny_base().save_pretrained(directory / "hybrid", max_shard_size="100KB")
    assert (directory / "hybrid" / "model.safetensors.index.json").exists()
    return {name: directory / name for name in ("glm", "hybrid")}


@pytest.mark.parametrize("piece", [weight_files.PIECE_BYTES, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["glm", "hybrid"])
def test_one_rank_loads_what_transformers_loads_bit_for_bit(
    snapshots: dict[str, Path], family: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "PIECE_BYTES", piece)
    expected = AutoModelForCausalLM.from_pretrained(snapshots[family], dtype=dtype).state_dict()
    model = load(snapshots[family], dtype=dtype)
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())


def test_of_a_multimodal_snapshot_the_language_model_is_loaded_with_its_head_tied(
    untrained_snapshot: Path, multimodal_snapshot: Path
) -> None:
    expected, model = load(untrained_snapshot), load(multimodal_snapshot)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_holds_its_experts_and_all_other_tensors_bit_for_bit(snapshots: dict[str, Path], rank: int) -> None:
    whole = dict(glm_oracle.tiny_base().state_dict())
    model = load(snapshots["glm"], place(rank, 4))
    loaded = dict(model.state_dict())
    assert loaded.keys() == whole.keys()
    share = model.config.n_routed_experts // 4
    sharded = 0
    for name, tensor in whole.items():
        expected = tensor
        if is_expert_parameter(name):
            expected = tensor[rank * share : (rank + 1) * share]
            sharded += 1
        assert torch.equal(loaded[name], expected), name
    assert sharded


def test_experts_that_a_file_holds_fused_are_cut_out_of_it(snapshots: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name: value.contiguous() for name, value in glm_oracle.tiny_base().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((snapshots["glm"] / "config.json").read_bytes())
    for experts in (ALONE, place(1, 2)):
        loaded, expected = (load(directory, experts).state_dict() for directory in (tmp_path, snapshots["glm"]))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_missing_expert_is_refused_only_by_the_rank_that_holds_it(snapshots: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(snapshots["glm"] / "model.safetensors")
    gone = next(name for name in sorted(tensors) if ".experts.0." in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((snapshots["glm"] / "config.json").read_bytes())
    load(tmp_path, place(1, 2))
    with pytest.raises(IntegrityError, match="lacks tensor"):
        load(tmp_path, place(0, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_codes_that_are_no_weights_are_refused_by_name(
    snapshots: dict[str, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    directory = tmp_path / "codes"
    shutil.copytree(snapshots["glm"], directory)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=f"tensor {name} .* is stored as .*, weights must be F64"):
        load(directory)


def test_an_index_that_leads_out_of_the_snapshot_is_refused(snapshots: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(snapshots["glm"] / "model.safetensors")
    save_file(tensors, tmp_path / "outside.safetensors")
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "config.json").write_bytes((snapshots["glm"] / "config.json").read_bytes())
    index = {"weight_map": dict.fromkeys(tensors, "../outside.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match="which is no file name"):
        load(inside)


MEASURE = """
import json, sys, torch
from pathlib import Path
from tests.engine import glm_oracle, oracle
from tests.training.test_base_weights import ALONE, Keeping, load, place
from longstraw_core.mixers.layer_weights import weights_on_use

small, snapshot, rank, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
divided = sys.argv[5]
load(small)  # what importing and building a model costs once is not the weights'

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = resident("VmRSS")
group = place(rank, size) if size > 1 else ALONE
keeping = Keeping(group, False) if divided == "layers" else None
model = load(snapshot, group if divided == "experts" else ALONE, keeping=keeping)
share = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
share += weights_on_use(model).kept_bytes if divided == "layers" else 0
print(json.dumps({"peak": resident("VmHWM") - before, "share": share}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
@pytest.mark.parametrize(
    ("family", "ranks", "divided"),
    [("glm", 4, "experts"), ("glm", 1, "none"), ("hybrid", 1, "none"), ("glm", 4, "layers"), ("hybrid", 4, "layers")],
)
def test_peak_host_memory_is_at_most_a_fifth_above_the_rank_s_share(
    snapshots: dict[str, Path], family: str, ranks: int, divided: str, tmp_path: Path
) -> None:
    if family == "glm":
        sizes = {"hidden_size": 256, "moe_intermediate_size": 768, "n_routed_experts": 32}
        model: Any = glm_oracle.tiny_base(**sizes)
    else:
        model = oracle.tiny_base(hidden_size=1024, intermediate_size=8192)
    model.save_pretrained(tmp_path / "model")
    total = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    arguments = [str(snapshots[family]), str(tmp_path / "model"), str(ranks // 2), str(ranks), divided]
    answer = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    measured = json.loads(answer.stdout.splitlines()[-1])
    assert measured["share"] > 75e6
    assert measured["share"] <= (total / 3 if ranks == 4 else total)
    assert measured["peak"] <= 1.2 * measured["share"], measured

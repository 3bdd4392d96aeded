"""Adapters: exactly the modules asked for, seeded, saved byte for byte, and foreign ones refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.transaction import LoraSpec
from longstraw_core.training.lora import inject_adapter, load_adapter, save_adapter, trainable_parameters
from tests.engine.oracle import full_logprobs, tiny_base

LAYERS = ("linear_attention", "full_attention")


def adapter_with_weights(lora: LoraSpec, seed: int = 0) -> PeftModel:
    model = inject_adapter(tiny_base(LAYERS), lora, seed=seed)
    generator = torch.Generator().manual_seed(seed + 7)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("attention", 5 + 4),
        ("attention+mlp", 5 + 4 + 6),
        ("all", 5 + 4 + 6),
        (("q_proj",), 1),
        (("gate_proj", "in_proj_a"), 3),
    ],
)
def test_exactly_the_modules_asked_for_are_trained(targets: object, expected: int) -> None:
    model = inject_adapter(tiny_base(LAYERS), LoraSpec(rank=3, targets=targets), seed=0)  # type: ignore[arg-type]
    names = trainable_parameters(model)
    assert len(names) == 2 * expected
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    if isinstance(targets, tuple):
        assert {name.split(".")[-3] for name in names} == set(targets)
    assert all(parameter.shape[0 if "lora_A" in name else 1] == 3 for name, parameter in names.items())
    assert not model.training


def test_an_unknown_target_lists_what_exists() -> None:
    with pytest.raises(
        SpecError, match=r"no module is called 'w_proj'; this model has down_proj, gate_proj, in_proj_a"
    ):
        inject_adapter(tiny_base(LAYERS), LoraSpec(targets=("q_proj", "w_proj")), seed=0)


def test_a_fresh_adapter_is_seeded_changes_nothing_and_leaves_the_generator_alone() -> None:
    base = tiny_base(LAYERS)
    with torch.no_grad():
        before = full_logprobs(base, [1, 2, 3], [4, 5])  # type: ignore[arg-type]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = inject_adapter(base, LoraSpec(rank=2), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        assert torch.equal(full_logprobs(first, [1, 2, 3], [4, 5]), before)
    same = trainable_parameters(inject_adapter(tiny_base(LAYERS), LoraSpec(rank=2), seed=1))
    other = trainable_parameters(inject_adapter(tiny_base(LAYERS), LoraSpec(rank=2), seed=2))
    ours = trainable_parameters(first)
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert any(not torch.equal(ours[name], other[name]) for name in ours)


def test_saved_adapters_load_exactly_here_and_in_peft(tmp_path: Path) -> None:
    lora = LoraSpec(rank=3, alpha=5.0, targets="all")
    model = adapter_with_weights(lora)
    save_adapter(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with torch.no_grad():
        expected = full_logprobs(model, [1, 2, 3], [4, 5])
        ours = load_adapter(tiny_base(LAYERS), tmp_path, expected=lora)
        assert torch.equal(full_logprobs(ours, [1, 2, 3], [4, 5]), expected)
        theirs = PeftModel.from_pretrained(tiny_base(LAYERS), tmp_path).eval()
        assert torch.equal(full_logprobs(theirs, [1, 2, 3], [4, 5]), expected)


def test_saving_is_deterministic_across_processes(tmp_path: Path) -> None:
    """PEFT keeps targets in a set, whose order follows the process's hash seed."""
    program = (
        "import sys, pathlib; sys.path.insert(0, 'tests');"
        "from training.test_lora import adapter_with_weights; from longstraw_core.training.lora import save_adapter;"
        "from longstraw_core.spec.transaction import LoraSpec;"
        "save_adapter(adapter_with_weights(LoraSpec(rank=2)), pathlib.Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "there")],
        cwd=root,
        env={"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "1", "PATH": ""},
        check=True,
        capture_output=True,
    )
    save_adapter(adapter_with_weights(LoraSpec(rank=2)), tmp_path / "here")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        content = (tmp_path / "here" / name).read_bytes()
        assert content == (tmp_path / "there" / name).read_bytes()
        assert str(root).encode() not in content


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    save_adapter(adapter_with_weights(LoraSpec(rank=3)), tmp_path)
    with pytest.raises(SpecError, match=r"adapter has rank 3.*asked for are rank 4"):
        load_adapter(tiny_base(LAYERS), tmp_path, expected=LoraSpec(rank=4))


def test_an_adapter_of_another_architecture_is_refused_by_tensor(tmp_path: Path) -> None:
    save_adapter(adapter_with_weights(LoraSpec(rank=3)), tmp_path)
    with pytest.raises(SpecError, match=r"lora_A.weight has shape \(3, 48\), this model needs \(3, 64\)"):
        load_adapter(tiny_base(LAYERS, hidden_size=64), tmp_path)
    with pytest.raises(SpecError, match=r"tensor base_model.*layers\.2.* is missing"):
        load_adapter(tiny_base((*LAYERS, "full_attention")), tmp_path)
    with pytest.raises(SpecError, match=r"no module is called 'k_proj'"):
        load_adapter(tiny_base(("linear_attention", "linear_attention")), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("empty", r"q_proj.lora_B.weight has shape \(0,\)"),
        ("missing", r"q_proj.lora_B.weight is missing"),
        ("unexpected", r"stranger.weight belongs to no module"),
        ("nan", r"q_proj.lora_B.weight contains values that are not finite"),
    ],
)
def test_a_damaged_adapter_is_refused_by_tensor(tmp_path: Path, change: str, message: str) -> None:
    save_adapter(adapter_with_weights(LoraSpec(rank=3)), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    if change == "empty":
        tensors[name] = torch.zeros(0)
    elif change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["stranger.weight"] = torch.zeros(1)
    else:
        tensors[name][0, 0] = torch.nan
    save_file(tensors, path)
    with pytest.raises((SpecError, IntegrityError), match=message):
        load_adapter(tiny_base(LAYERS), tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("peft_type", "LOHA"),
        ("lora_dropout", 0.1),
        ("target_modules", "all-linear"),
        ("r", None),
        ("r", True),
        ("r", 0),
        ("r", 2**40),
        ("lora_alpha", 0),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**400),
        ("lora_alpha", True),
        ("init_lora_weights", "pissa_niter_4"),
        # fields that give the same tensors another meaning
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("layers_to_transform", [0]),
        ("exclude_modules", ["q_proj"]),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1.0}),
        ("a_field_of_a_later_peft", True),
    ],
)
def test_an_unsupported_configuration_is_refused(tmp_path: Path, field: str, value: object) -> None:
    save_adapter(adapter_with_weights(LoraSpec(rank=3)), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(SpecError, match=rf"adapter_config.json.*{'alpha' if field == 'lora_alpha' else field}"):
        load_adapter(tiny_base(LAYERS), tmp_path)


def test_bytes_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    save_adapter(adapter_with_weights(LoraSpec(rank=3)), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(IntegrityError, match="not a readable safetensors file"):
        load_adapter(tiny_base(LAYERS), tmp_path)

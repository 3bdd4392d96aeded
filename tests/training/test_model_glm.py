"""Loading GLM snapshots, one update, and the size of the resident state from the configuration alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstraw_core.engine.policy import Policy
from longstraw_core.spec import TransactionSpec
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ModelSpec, ObjectiveSpec, OptimizerSpec
from longstraw_core.training.lora import inject_adapter, save_adapter, trainable_parameters
from longstraw_core.training.model import load_base_model, load_policy_model
from longstraw_core.training.optimizer import SingleProcessOptimizer
from longstraw_core.training.state_size import estimate_state_bytes
from longstraw_core.training.update import UpdateGroup, run_update
from tests.engine.glm_oracle import tiny_base
from tests.engine.groups import records, scored_group
from tests.engine.oracle import full_logprobs, random_batch

SPEC = ModelSpec(snapshot="model", family="glm_moe_dsa", dtype="float32")
LORA = LoraSpec(rank=2)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm") / "model"
    tiny_base().save_pretrained(directory)
    return directory


def test_base_and_adapter_come_back_frozen_and_update(snapshot: Path, tmp_path: Path) -> None:
    save_adapter(inject_adapter(tiny_base(), LORA, seed=0), tmp_path / "adapter")
    model = load_policy_model(snapshot, tmp_path / "adapter", SPEC, lora=LORA)
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in model.named_parameters())
    batch = random_batch(30, [5, 6])
    with torch.no_grad():
        old = [full_logprobs(model, batch.prompt, response).tolist() for response in batch.responses]
        base = full_logprobs(tiny_base(), batch.prompt, batch.responses[0])  # type: ignore[arg-type]
    torch.testing.assert_close(torch.tensor(old[0]), base, rtol=0, atol=1e-5)
    policy = Policy(model, LayoutSpec(prompt_chunk_tokens=16, page_tokens=8), gradient="exact")
    group = scored_group(batch.prompt, batch.responses, batch.advantages, sampler_logprobs=old)
    before = {name: parameter.detach().clone() for name, parameter in trainable_parameters(model).items()}
    result = run_update(
        policy,
        [UpdateGroup(group, records(group, old), lambda: policy.capture(batch.prompt, adapter=True))],
        objective=ObjectiveSpec(),
        optimizer=SingleProcessOptimizer(model, OptimizerSpec(learning_rate=1e-3)),
        max_response_tokens=8,
    )
    assert result.stepped
    moved = [name for name, value in trainable_parameters(model).items() if not torch.equal(value, before[name])]
    assert {"experts", "kv_b_proj", "shared_experts"} <= {part for name in moved for part in name.split(".")}
    assert policy.pool.used_bytes == 0


def test_bfloat16_keeps_router_and_adapter_in_float32(snapshot: Path, tmp_path: Path) -> None:
    save_adapter(inject_adapter(tiny_base(), LORA, seed=0), tmp_path / "adapter")
    model = load_policy_model(snapshot, tmp_path / "adapter", SPEC.model_copy(update={"dtype": "bfloat16"}))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert all(dtype == torch.float32 for name, dtype in dtypes.items() if "lora_" in name or ".gate.weight" in name)
    assert all(dtype == torch.bfloat16 for name, dtype in dtypes.items() if name.endswith("q_a_proj.base_layer.weight"))
    policy = Policy(model, LayoutSpec(), gradient="stopgrad")
    state = policy.capture(list(range(40)), adapter=True)
    assert torch.isfinite(policy.replay(state, [1, 2], temperature=1.0).logprobs_R).all()


def test_an_incomplete_snapshot_is_refused_by_tensor(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((snapshot / "config.json").read_bytes())
    tensors = load_file(snapshot / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.3.self_attn.indexer.wk.weight"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"lacks tensor .*layers\.3\.self_attn\.indexer\.wk\.weight"):
        load_base_model(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_topk", 0),
        ("index_topk", -1),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 10_000),
        ("n_group", 3),
    ],
)
def test_choices_that_cannot_be_made_are_refused_by_name(
    snapshot: Path, tmp_path: Path, field: str, value: int
) -> None:
    fields = json.loads((snapshot / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: value}))
    shutil.copy(snapshot / "model.safetensors", tmp_path)
    with pytest.raises(SpecError, match=f"{field} is {value}"):
        load_base_model(tmp_path, SPEC)


def test_a_model_of_the_other_family_is_refused(snapshot: Path) -> None:
    with pytest.raises(SpecError, match="is a glm_moe_dsa model, not qwen3_5_text"):
        load_base_model(snapshot, ModelSpec(snapshot="model", family="qwen3_5_text"))


@pytest.mark.parametrize("mode", ["exact", "stopgrad"])
def test_the_state_size_is_known_from_the_configuration_alone(snapshot: Path, mode: str) -> None:
    fields = {
        "name": "size",
        "model": SPEC.model_dump() | {"snapshot": str(snapshot)},
        "data": {"path": "rows.jsonl"},
        "objective": {"gradient": mode},
        "layout": {"prompt_chunk_tokens": 24, "page_tokens": 16},
    }
    spec = TransactionSpec.model_validate(fields)
    model = inject_adapter(tiny_base(), LORA, seed=0)
    policy = Policy(model, spec.layout, gradient=spec.objective.gradient)
    assert estimate_state_bytes(snapshot, spec, 100) == policy.state_bytes(100)
    per_token = 5 * (28 + 8) * 4 + 2 * 16 * 4
    assert policy.state_bytes(97).pages == 96 * per_token

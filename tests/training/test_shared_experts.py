"""A GLM snapshot with its experts, and their adapters, shared by two ranks: the gradient of one process."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from longstraw_core.spec.transaction import LayoutSpec, LoraSpec
from longstraw_core.training.gradients import GradientsRequest, GradientsSummary, gradients_on_rank
from longstraw_core.training.launch import run_function
from longstraw_core.training.lora import inject_adapter, save_adapter
from tests.engine.glm_oracle import tiny_base
from tests.engine.oracle import random_batch


def test_the_gradient_of_shared_experts_is_that_of_one_process(tmp_path: Path) -> None:
    tiny_base().save_pretrained(tmp_path / "model")
    adapted = inject_adapter(tiny_base(), LoraSpec(rank=2), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(adapted, tmp_path / "adapter")
    # one token and two hundred, accumulated one at a time
    batch = random_batch(61, [1, 200], seed=3)
    fields = {
        "prompt_token_ids": list(batch.prompt),
        "responses": [
            {"token_ids": list(response), "advantage": advantage, "old_logprobs": None}
            for response, advantage in zip(batch.responses, batch.advantages, strict=True)
        ],
        "clip": [0.2, 0.2],
        "aggregation": "token_mean",
    }
    results = {}
    for ranks in (1, 2):
        request = GradientsRequest(
            model=str(tmp_path / "model"),
            adapter=str(tmp_path / "adapter"),
            batch=json.dumps(fields),
            source="batch",
            gradient="exact",
            dtype="float32",
            layout=LayoutSpec(prompt_chunk_tokens=25, page_tokens=16),
            out=str(tmp_path / f"{ranks}.safetensors"),
        )
        answer = run_function(
            gradients_on_rank,
            request.model_dump_json().encode(),
            tmp_path / f"run-{ranks}",
            context_parallel=ranks,
            expert_parallel=ranks,
        )
        results[ranks] = GradientsSummary.model_validate_json(answer), load_file(request.out)
    (alone, expected), (together, ours) = results[1], results[2]
    assert abs(together.loss - alone.loss) <= 1e-5
    assert abs(together.gradient_norm - alone.gradient_norm) <= 1e-4 * alone.gradient_norm
    assert ours.keys() == expected.keys()
    assert any(".experts." in name for name in ours)
    for name, value in expected.items():
        assert ours[name].shape == value.shape
        assert float((ours[name] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-9, name

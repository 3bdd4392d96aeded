"""On one GPU (`make test-gpu`): bf16 parity, the GPU's kernels against the CPU's, memory at 131,072 prompt tokens."""

import dataclasses
import json

import pytest
import torch

from longstraw_core.engine.policy import Policy
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import Family, LayoutSpec
from longstraw_core.training.conventional import ModelSize, random_batch, random_policy_model
from longstraw_core.training.parity import ParityCase, engine_gradients, run_parity, worst_parameter
from longstraw_core.training.process_groups import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FAMILIES: tuple[Family, ...] = ("qwen3_5_text", "glm_moe_dsa")
LONG_PROMPT = 131_072


def case(family: Family, *, dtype: str, gradient: GradientMode = "exact") -> ParityCase:
    return ParityCase(
        family=family,
        gradient=gradient,
        prompt_tokens=301,
        response_tokens=(33, 1, 20),
        chunk_tokens=100,
        page_tokens=48,
        layers=8,
        seed=0,
        dtype=dtype,
        checkpoint_layers=False,
        device="cuda",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_agree_with_conventional_training(family: Family, dtype: str) -> None:
    report = run_parity(case(family, dtype=dtype), Ranks.alone("cuda"))
    assert report.passed, report.checks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_of_the_gpu_agree_with_those_of_the_cpu(family: Family) -> None:
    gradients = {}
    for device in ("cpu", "cuda"):
        here = dataclasses.replace(case(family, dtype="float32"), device=device)
        model = random_policy_model(family, ModelSize(layers=here.layers), seed=here.seed).to(device)
        batch = random_batch(ModelSize().vocabulary, here.prompt_tokens, here.response_tokens, seed=1)
        found, _ = engine_gradients(here, model, batch, Ranks.alone(device))
        gradients[device] = {name: gradient.cpu() for name, gradient in found.items()}
    assert worst_parameter(gradients["cuda"], gradients["cpu"]).relative_l2 <= 1e-4


def peak_of_update(responses: int) -> int:
    """Peak allocated bytes of capture, replay and sweep of the tiny hybrid; the prompt is the same for any group."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = random_policy_model("qwen3_5_text", ModelSize(positions=1 << 18), dtype=torch.bfloat16).to("cuda")
    policy = Policy(model, LayoutSpec(), gradient="exact")
    batch = random_batch(ModelSize().vocabulary, LONG_PROMPT, [256] * responses, seed=2)
    state = policy.capture(batch.prompt, adapter=True)
    for response in batch.responses:
        policy.replay(state, response, temperature=1.0).logprobs_R.mean().backward()
        state.verify_witness()
    policy.reverse_sweep(state)
    state.release()
    return torch.cuda.max_memory_allocated()


def test_memory_at_131072_prompt_tokens_does_not_grow_with_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = {responses: peak_of_update(responses) for responses in (2, 8)}
    with capsys.disabled():
        print(json.dumps({"prompt_tokens": LONG_PROMPT, "peak_bytes": peaks}))
    assert peaks[8] <= 1.01 * peaks[2]

"""Responses accumulated one at a time on four ranks: the loss of one padded batch, and every token's own gradient."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longstraw_core.engine.objective import Normaliser, ObjectiveMetrics
from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.spec.transaction import LayoutSpec, ObjectiveSpec
from longstraw_core.training.phases import PhaseClock
from longstraw_core.training.update import UpdateGroup, accumulate_gradients
from tests.engine import glm_oracle, oracle
from tests.engine.groups import records, scored_group
from tests.engine.oracle import Batch, full_logprobs, gradients, random_batch, worst_relative_error
from tests.engine.parallel.cases import groups_of, summed
from tests.ranks import run_on_ranks

RANKS = 4
FAMILIES = {"hybrid": oracle.tiny_policy_model, "glm": glm_oracle.tiny_policy_model}
LAYOUT = LayoutSpec(prompt_chunk_tokens=20, page_tokens=8)
PROMPTS = {
    "hybrid": [random_batch(31, (1, 1000), seed=5), random_batch(18, (5, 3), seed=6)],
    # shorter: among more tokens two scores come so close that rounding decides between them
    "glm": [random_batch(31, (1, 150), seed=5), random_batch(18, (5, 3), seed=6)],
}
OBJECTIVES = [ObjectiveSpec(aggregation=name) for name in ("token_mean", "sequence_mean", "dr_grpo")]
MAX_RESPONSE_TOKENS = 1024
DEALT = random_batch(42, (6,), seed=7)
"""Four ranks own 2, 2, 1 and 1 tokens of the response, and of a prompt chunk 5 each: labels lie on all boundaries."""


def accumulated(
    policy: Policy, objective: ObjectiveSpec, batches: Sequence[Batch], old: list[list[list[float]]]
) -> None:
    """Leave the gradient of the objective in the parameters, response after response."""
    groups = []
    for number, (batch, old_logprobs) in enumerate(zip(batches, old, strict=True)):
        group = scored_group(
            batch.prompt, batch.responses, batch.advantages, sampler_logprobs=old_logprobs, prompt_id=f"p{number}"
        )
        groups.append(
            UpdateGroup(
                group,
                records(group, old_logprobs),
                lambda batch=batch: policy.capture(batch.prompt, adapter=policy.captures_with_adapter),
            )
        )
    normaliser = Normaliser.over([entry.group for entry in groups], objective, max_response_tokens=MAX_RESPONSE_TOKENS)
    assert normaliser is not None
    accumulate_gradients(
        policy,
        groups,
        objective=objective,
        normaliser=normaliser,
        metrics=ObjectiveMetrics(),
        clock=PhaseClock(torch.device("cpu")),
    )


def _run(rank: int, folder: str) -> None:
    everyone = RankGroup.of(groups_of(RANKS, RANKS)[0])
    for family, build in FAMILIES.items():
        model, experts = build(), everyone if family == "glm" else ALONE
        policy = Policy(model, LAYOUT, gradient="exact", context=everyone, experts=experts)
        old = json.loads((Path(folder) / f"{family}.json").read_text())

        def keep(name: str, model: PeftModel = model, experts: RankGroup = experts) -> None:
            total = summed(gradients(model), everyone, experts)
            model.zero_grad(set_to_none=True)
            if rank == 0:
                save_file(total, Path(folder) / f"{name}.safetensors")

        for objective in OBJECTIVES:
            accumulated(policy, objective, PROMPTS[family], old)
            keep(f"{family}-{objective.aggregation}")
        state = policy.capture(DEALT.prompt, adapter=True)
        for token in range(len(DEALT.responses[0])):
            policy.replay(state, DEALT.responses[0], temperature=1.0).logprobs_R[token].backward()
            policy.reverse_sweep(state)
            keep(f"{family}-token-{token}")
        state.release()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for family, build in FAMILIES.items():
        (folder / f"{family}.json").write_text(json.dumps(old_logprobs(build(), PROMPTS[family])))
    run_on_ranks(RANKS, _run, str(folder), directory=folder / "run", seconds=600.0)
    return folder


@torch.no_grad()
def old_logprobs(model: PeftModel, batches: Sequence[Batch]) -> list[list[list[float]]]:
    """Off the policy by a tenth, so that ratios differ from one and some are clipped."""
    generator = torch.Generator().manual_seed(8)
    return [
        [
            (exact_R + 0.1 * torch.randn(exact_R.shape, generator=generator)).clamp(max=0.0).tolist()
            for exact_R in (full_logprobs(model, batch.prompt, response) for response in batch.responses)
        ]
        for batch in batches
    ]


_references: dict[str, dict[str, dict[str, torch.Tensor]]] = {}


def one_batch(family: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients by aggregation: all sequences padded to one batch, one forward, the loss as its name declares it."""
    if family in _references:
        return _references[family]
    model, batches = FAMILIES[family](), PROMPTS[family]
    old = json.loads((folder / f"{family}.json").read_text())
    rows = [
        (batch.prompt, response, advantage, torch.tensor(response_old))
        for batch, of_batch in zip(batches, old, strict=True)
        for response, advantage, response_old in zip(batch.responses, batch.advantages, of_batch, strict=True)
    ]
    width = max(len(prompt) + len(response) for prompt, response, *_ in rows)
    ids_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    real_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    old_BT, label_BT = torch.zeros((len(rows), width)), torch.zeros((len(rows), width))
    for row, (prompt, response, _, response_old) in enumerate(rows):
        end = len(prompt) + len(response)
        ids_BT[row, :end], real_BT[row, :end] = torch.tensor([*prompt, *response]), 1
        old_BT[row, len(prompt) : end], label_BT[row, len(prompt) : end] = response_old, 1.0
    logits_BTV = model(input_ids=ids_BT[:, :-1], attention_mask=real_BT[:, :-1], use_cache=False).logits.float()
    logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    label_BT, advantage_B1 = label_BT[:, 1:], torch.tensor([[advantage] for _, _, advantage, _ in rows])
    ratio_BT = torch.exp((logprobs_BT - old_BT[:, 1:]) * label_BT)
    low, high = 1 - OBJECTIVES[0].clip_low, 1 + OBJECTIVES[0].clip_high
    loss_BT = -torch.min(ratio_BT * advantage_B1, ratio_BT.clamp(low, high) * advantage_B1) * label_BT
    losses = {
        "token_mean": loss_BT.sum() / label_BT.sum(),
        "sequence_mean": (loss_BT.sum(1) / label_BT.sum(1)).mean(),
        "dr_grpo": loss_BT.sum() / (len(rows) * MAX_RESPONSE_TOKENS),
    }
    found = {}
    for aggregation, loss in losses.items():
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        found[aggregation] = gradients(model)
    _references[family] = found
    return found


@pytest.mark.parametrize("aggregation", [objective.aggregation for objective in OBJECTIVES])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_and_many_accumulate_to_the_declared_mean_of_one_batch(
    family: str, aggregation: str, results: Path
) -> None:
    ours = load_file(results / f"{family}-{aggregation}.safetensors")
    assert worst_relative_error(ours, one_batch(family, results)[aggregation]) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_counts_once_also_where_its_label_is_on_another_rank(family: str, results: Path) -> None:
    """The gradient of one token's log-probability alone: none is lost or doubled, and no number of ranks is in it."""
    model = FAMILIES[family]()
    for token in range(len(DEALT.responses[0])):
        model.zero_grad(set_to_none=True)
        full_logprobs(model, DEALT.prompt, DEALT.responses[0])[token].backward()
        ours = load_file(results / f"{family}-token-{token}.safetensors")
        assert worst_relative_error(ours, gradients(model)) <= 1e-4, token

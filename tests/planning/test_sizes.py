"""The plan's formulas against the engine's own counts and against published figures of the two large models."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from longstraw_core.engine.policy import Policy
from longstraw_core.mixers.exchange.ownership import PromptOwnership, SegmentOwnership
from longstraw_core.mixers.exchange.rank_group import RankGroup
from longstraw_core.mixers.exchange.volume import (
    AttentionSizes,
    IndexSizes,
    attention_travels,
    head_exchange,
    index_keys_travel,
    index_queries_travel,
    index_travels,
    keys_travel,
    queries_travel,
    swept_attention_travels,
)
from longstraw_core.mixers.layer_weights import share_loaded_layers, weights_on_use
from longstraw_core.planning.architecture import Architecture, GatedDelta, LatentAttention, Layer, read_architecture
from longstraw_core.planning.memory import (
    DELTA_CHUNK,
    Ranks,
    adapter_parameters,
    base_weights,
    resident_state,
)
from longstraw_core.planning.traffic import Pass, layer_traffic
from longstraw_core.planning.work import (
    context_operations,
    linear_operations,
    rule_operations,
    transaction_work,
)
from longstraw_core.spec import SpecError
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec
from longstraw_core.training.conventional import ModelSize, random_policy_model
from longstraw_core.training.lora import inject_adapter

PLANS = Path(__file__).parents[2] / "examples" / "plans"
MIB = 1 << 20


def large(name: str) -> Architecture:
    return read_architecture(json.loads((PLANS / name / "config.json").read_text()), name)


def small(family: str) -> tuple[Any, Architecture]:
    model = random_policy_model(family, ModelSize())
    return model, read_architecture(model.get_base_model().config.to_dict(), family)


@pytest.mark.parametrize("gradient", ["exact", "stopgrad", "response_adapter"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_the_state_is_what_the_engine_allocates(family: str, gradient: GradientMode) -> None:
    _, architecture = small(family)
    model = random_policy_model(family, ModelSize())
    for record in ("cut", "positions"):
        layout = LayoutSpec(prompt_chunk_tokens=192, page_tokens=100, selection_record=record)
        policy = Policy(model, layout, gradient=gradient)
        for tokens in (1, 2, 193, 257, 258, 5000, 70_000):
            engine = policy.state_bytes(tokens)
            ours = resident_state(architecture, layout, gradient, 4, tokens)
            assert (ours.pages, ours.recurrent, ours.boundaries, ours.gradient_sinks, ours.choices) == (
                engine.pages,
                engine.recurrent,
                engine.boundaries,
                engine.gradient_sinks,
                engine.choices,
            ), tokens


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_weights_are_those_of_the_model_but_for_vectors(family: str) -> None:
    model, architecture = small(family)
    matrices = sum(
        parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name and parameter.dim() > 1
    )
    assert architecture.parameters == matrices


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_weights_on_use_are_those_that_a_rank_keeps(family: str, ranks: int) -> None:
    model, architecture = small(family)
    base = model.get_base_model()
    whole = sum(
        parameter.nbytes for name, parameter in base.named_parameters() if "lora_" not in name and parameter.dim() > 1
    )
    planned = base_weights(architecture, Ranks(ranks, 1), element=4, sharded=False, quantised=False)
    assert (planned.kept, planned.on_use, sum(planned.sent)) == (whole, 0.0, 0.0)
    # nothing is exchanged with the others of this group
    share_loaded_layers(base, RankGroup(0, ranks, cast(Any, object())), experts_divided=False)
    on_use = weights_on_use(base)
    assert on_use is not None
    outside = sum(parameter.nbytes for parameter in {base.lm_head.weight, base.model.embed_tokens.weight})
    planned = base_weights(architecture, Ranks(ranks, 1), element=4, sharded=True, quantised=False)
    assert planned.kept - outside == pytest.approx(on_use.kept_bytes, rel=0.02)
    assert planned.on_use == (0.0 if ranks == 1 else pytest.approx(max(planned.sent) * ranks / (ranks - 1)))
    assert sum(planned.sent) == pytest.approx((ranks - 1) * on_use.kept_bytes, rel=0.02)


def test_the_large_hybrid_fits_in_shares_and_in_four_bits() -> None:
    hybrid, ranks = large("qwen3.6-27b"), Ranks(8, 1)
    outside = 2 * hybrid.embedding_parameters
    layers = 2 * hybrid.parameters - outside
    shared = base_weights(hybrid, ranks, element=2, sharded=True, quantised=False)
    assert shared.kept == pytest.approx(outside + layers / 8)
    assert shared.on_use == pytest.approx(layers / 64, rel=0.1)
    four_bits = base_weights(hybrid, ranks, element=2, sharded=False, quantised=True)
    assert four_bits.kept == pytest.approx(outside + layers * 4.5 / 16, rel=0.001)
    both = base_weights(hybrid, ranks, element=2, sharded=True, quantised=True)
    assert both.kept == pytest.approx(outside + layers * 4.5 / 16 / 8, rel=0.005)
    mixture = large("glm-5.2")
    divided = base_weights(mixture, Ranks(32, 32), element=2, sharded=True, quantised=False)
    dense = mixture.dense_parameters - mixture.embedding_parameters
    expected = 2 * (mixture.embedding_parameters + dense / 32 + mixture.expert_parameters / 32)
    assert divided.kept == pytest.approx(expected)


@pytest.mark.parametrize("targets", ["attention", "attention+mlp", "all"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_the_adapter_has_as_many_parameters_as_peft_makes(family: str, targets: Any) -> None:
    from longstraw_core.planning.sizing import PRESETS

    wrapped, architecture = small(family)
    model = inject_adapter(wrapped.unload(), LoraSpec(rank=4, targets=targets), seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert adapter_parameters(architecture, PRESETS[targets], 4) == trained


def test_the_large_models_have_their_published_sizes() -> None:
    hybrid, mixture = large("qwen3.6-27b"), large("glm-5.2")
    assert hybrid.parameters == pytest.approx(27e9, rel=0.01)
    assert mixture.parameters == pytest.approx(743e9, rel=0.01)  # 753B with the layer that only predicts ahead
    state = resident_state(hybrid, LayoutSpec(), "stopgrad", 2, 1 + (1 << 20))
    assert state.pages == 65_536 << 20
    assert state.recurrent == 48 * (3 * MIB + 3 * 10_240 * 2)
    latents = resident_state(mixture, LayoutSpec(), "stopgrad", 2, 1 + (1 << 20))
    assert latents.pages == 95_232 << 20


ATTENTION = {
    "qwen3.6-27b": AttentionSizes(heads=24, query_width=256, value_width=256, row_values=2 * 4 * 256, element_bytes=2),
    "glm-5.2": AttentionSizes(heads=64, query_width=576, value_width=512, row_values=576, element_bytes=2),
}
INDEX = IndexSizes(heads=32, width=128, selected=2048, element_bytes=2)


def sent_in_a_pass(name: str, segment: SegmentOwnership, *, capture: bool, sweep: bool, recorded: bool) -> float:
    """What the engine's own formulas and choices say of one segment's pass through all layers, experts apart."""
    ranks, sizes, backward = segment.prompt.ranks, ATTENTION[name], not capture
    if recorded and name == "glm-5.2":
        travels = swept_attention_travels(sizes, segment)
    else:
        travels = attention_travels(sizes, segment, state_gradient=True, backward=backward)
    volume = (
        queries_travel(sizes, segment) if travels == "queries" else keys_travel(sizes, segment, state_gradient=True)
    )
    attention = volume.total if backward else volume.forward
    state_only = 1 if capture or sweep else 0
    if name == "qwen3.6-27b":
        delta = head_exchange(10_240 // ranks, 48 // ranks, 128, 2, segment)
        return (16 - state_only) * attention + 48 * (delta.total if backward else delta.forward)
    told = 0
    if index_travels(INDEX, segment) == "queries":
        index = index_queries_travel(INDEX, segment)
    else:
        index = index_keys_travel(INDEX, segment)
        told = 4 * max(segment.counts) * (ranks - 1) * min(2048, segment.start + segment.tokens)
    return (78 - state_only) * attention + 21 * (index.forward + (told if travels == "queries" else 0))


@pytest.mark.parametrize("chunk", [512, 8192])
@pytest.mark.parametrize("chunks", [1, 2, 40, 160])
@pytest.mark.parametrize(("name", "ranks"), [("qwen3.6-27b", 8), ("glm-5.2", 32)])
def test_traffic_is_what_the_engines_formulas_say(name: str, ranks: int, chunks: int, chunk: int) -> None:
    """Tests of the engine compare these formulas with a byte meter (`tests/engine/parallel/test_traffic.py`)."""
    prompt = PromptOwnership.chunked(chunks * chunk, chunk, ranks=ranks)
    segments = [SegmentOwnership(prompt, start, chunk) for start in prompt.chunk_starts]
    work = transaction_work(
        large(name),
        Ranks(ranks, 1),
        gradient="exact",
        targets=(),
        rank=1,
        element=2,
        chunk_tokens=chunk,
        checkpoint_layers=False,
        prompt_tokens=prompt.tokens + 1,
        response_tokens=1024,
        group=3,
    )
    captured = sum(sent_in_a_pass(name, of, capture=True, sweep=False, recorded=True) for of in segments)
    swept = sum(sent_in_a_pass(name, of, capture=False, sweep=True, recorded=True) for of in segments)
    response = SegmentOwnership(prompt, prompt.tokens, 1024)
    replayed = 3 * sent_in_a_pass(name, response, capture=False, sweep=False, recorded=False)
    assert (work.capture_traffic, work.sweep_traffic, work.replay_traffic) == pytest.approx(
        (captured, swept, replayed), rel=1e-6
    )


def test_a_recomputed_layer_sends_its_forward_again_but_does_not_select_again() -> None:
    for name, kind in (("qwen3.6-27b", "GatedDelta"), ("qwen3.6-27b", "FullAttention"), ("glm-5.2", "LatentAttention")):
        layer = next(layer for layer in large(name).layers if type(layer.mixer).__name__ == kind)

        def sent(way: Pass, layer: Layer = layer) -> float:
            return layer_traffic(layer, 2048, 1 << 21, Ranks(8, 1), 2, way)

        index = sent(Pass(backward=False)) - sent_without_index(layer)
        again = sent(Pass(backward=True, again=True)) - sent(Pass(backward=True))
        assert again == pytest.approx(sent(Pass(backward=False)) - index)


def sent_without_index(layer: Layer) -> float:
    """The forward of a layer that shares another one's selection."""
    if isinstance(layer.mixer, LatentAttention):
        layer = replace(layer, mixer=replace(layer.mixer, indexes=False))
    return layer_traffic(layer, 2048, 1 << 21, Ranks(8, 1), 2, Pass(backward=False))


def test_one_rank_sends_nothing() -> None:
    work = transaction_work(
        large("qwen3.6-27b"),
        Ranks(),
        gradient="exact",
        targets=(),
        rank=1,
        element=2,
        chunk_tokens=2048,
        checkpoint_layers=False,
        prompt_tokens=10_000,
        response_tokens=100,
        group=2,
    )
    assert work.traffic == 0.0


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_operations_of_every_layer_are_what_torch_counts(family: str) -> None:
    """The counts of transformers' own forward pass, layer by layer, to the last operation where both do the same."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model, architecture = small(family)
    base, tokens = model.unload(), 64
    base.set_attn_implementation("eager")
    base.set_experts_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        base(input_ids=torch.randint(2, 500, (1, tokens)), use_cache=False, logits_to_keep=1)
    counted = counter.get_flop_counts()
    for number, layer in enumerate(architecture.layers):
        (of_layer,) = (found for name, found in counted.items() if name.endswith(f"model.layers.{number}"))
        of_kind = {str(kind): count for kind, count in of_layer.items()}
        assert of_kind.pop("aten.mm") == tokens * (linear_operations(layer) - rule_operations(layer))
        attention, scoring = (tokens * part for part in context_operations(layer, tokens))
        if isinstance(layer.mixer, LatentAttention):  # transformers unfolds the latents, the engine does not
            attention = of_layers_without_indexer(architecture, counted)
        if not isinstance(layer.mixer, GatedDelta):
            assert of_kind == {"aten.bmm": attention + scoring}
            continue
        # of the delta rule's two triangular systems torch counts nothing: the reference solves them by rows
        mixer = layer.mixer
        systems = tokens * mixer.value_heads * DELTA_CHUNK * (mixer.key_dim + mixer.value_dim)
        counted_rule = sum(of_kind.values())
        assert 0.0 <= tokens * rule_operations(layer) - counted_rule <= systems


def of_layers_without_indexer(architecture: Architecture, counted: Any) -> int:
    """What transformers' attention costs in a layer that takes over another one's selection."""
    number = next(
        number
        for number, layer in enumerate(architecture.layers)
        if isinstance(layer.mixer, LatentAttention) and not layer.mixer.indexes
    )
    (found,) = (found for name, found in counted.items() if name.endswith(f"model.layers.{number}"))
    return next(count for kind, count in found.items() if str(kind) == "aten.bmm")


@pytest.mark.parametrize(
    ("family", "prompt", "gradient"),
    [
        ("qwen3_5_text", 257, "exact"),
        ("qwen3_5_text", 1025, "exact"),
        ("qwen3_5_text", 1025, "stopgrad"),
        ("glm_moe_dsa", 1025, "exact"),
        ("glm_moe_dsa", 1025, "stopgrad"),
        ("glm_moe_dsa", 1025, "response_adapter"),
    ],
)
def test_operations_of_every_phase_are_within_a_tenth_of_what_the_engine_does(
    family: str, prompt: int, gradient: GradientMode
) -> None:
    """Counted while the engine captures, replays with gradients, and sweeps; the kernels' waste is the difference."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = random_policy_model(family, ModelSize())
    _, architecture = small(family)
    response, chunk = 64, 256
    policy = Policy(model, LayoutSpec(prompt_chunk_tokens=chunk, page_tokens=64), gradient=gradient)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, 500, (prompt + response,), generator=generator).tolist()
    counted: dict[str, int] = {}

    def count(phase: str, work: Callable[[], Any]) -> Any:
        counter = FlopCounterMode(display=False)
        with counter:
            result = work()
        counted[phase] = counter.get_total_flops()
        return result

    state = count("capture", lambda: policy.capture(tokens[:prompt], adapter=gradient != "response_adapter"))
    count("replay", lambda: policy.replay(state, tokens[prompt:], temperature=1.0).logprobs_R.sum().backward())
    if gradient == "exact":
        count("sweep", lambda: policy.reverse_sweep(state))
    config = model.peft_config["default"]
    experts = {".".join(name.split(".")[-2:]) for name in config.target_parameters or ()}
    work = transaction_work(
        architecture,
        Ranks(),
        gradient=gradient,
        targets={*config.target_modules, *experts},
        rank=config.r,
        element=4,
        chunk_tokens=chunk,
        checkpoint_layers=False,
        prompt_tokens=prompt,
        response_tokens=response,
        group=1,
    )
    for phase, operations in counted.items():
        assert getattr(work, phase) == pytest.approx(operations, rel=0.1), (phase, getattr(work, phase) / operations)
    assert work.replay == pytest.approx(counted["replay"], rel=0.01)


def test_modes_cost_what_the_concept_says() -> None:
    def work(gradient: GradientMode, group: int) -> Any:
        return transaction_work(
            large("qwen3.6-27b"),
            Ranks(8, 1),
            gradient=gradient,
            targets=(),
            rank=1,
            element=2,
            chunk_tokens=8192,
            checkpoint_layers=False,
            prompt_tokens=100_000,
            response_tokens=1000,
            group=group,
        )

    assert work("stopgrad", 8).sweep == 0.0
    assert work("stopgrad", 8).capture == work("exact", 2).capture
    assert work("exact", 8).replay == 4 * work("exact", 2).replay
    assert 2.0 <= work("exact", 8).sweep / work("exact", 8).capture <= 3.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_size": "5120"}, "hidden_size is '5120'"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(change: dict[str, Any], words: str) -> None:
    config = json.loads((PLANS / "qwen3.6-27b" / "config.json").read_text()) | change
    with pytest.raises(SpecError, match=r"config\.json") as refused:
        read_architecture(config, "config.json")
    assert words in str(refused.value)

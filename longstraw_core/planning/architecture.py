"""The shape of a model, read from a Hugging Face configuration: every layer's mixer and network with its widths."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from longstraw_core.spec.errors import SpecError

FP32 = 4
"""Bytes of an fp32 number."""
DELTA_CHUNK = 64
"""Tokens per chunk of the delta rule."""


@dataclass(frozen=True)
class Linear:
    """One projection y = W x, by the name that LoRA targets use."""

    name: str
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        """Number of weights; none of the projections has a bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta net."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Width of all keys (and of all queries)."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its projections."""
        return (
            Linear("in_proj_qkv", self.hidden, self.channels),
            Linear("in_proj_z", self.hidden, self.values),
            Linear("in_proj_b", self.hidden, self.value_heads),
            Linear("in_proj_a", self.hidden, self.value_heads),
            Linear("out_proj", self.values, self.hidden),
        )


@dataclass(frozen=True)
class FullAttention:
    """Grouped-query attention with an output gate."""

    hidden: int
    heads: int
    key_heads: int
    head_dim: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its projections; `q_proj` makes the gate too."""
        width = self.heads * self.head_dim
        keys = self.key_heads * self.head_dim
        return (
            Linear("q_proj", self.hidden, 2 * width),
            Linear("k_proj", self.hidden, keys),
            Linear("v_proj", self.hidden, keys),
            Linear("o_proj", width, self.hidden),
        )


@dataclass(frozen=True)
class LatentAttention:
    """MLA with selected tokens (DSA); a layer with `indexes` selects, the others use the last selection."""

    hidden: int
    heads: int
    query_rank: int
    latent: int
    rope: int
    nope: int
    value_dim: int
    indexes: bool
    index_heads: int
    index_dim: int
    selected: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its projections that LoRA may adapt."""
        return (
            Linear("q_a_proj", self.hidden, self.query_rank),
            Linear("q_b_proj", self.query_rank, self.heads * (self.nope + self.rope)),
            Linear("kv_a_proj_with_mqa", self.hidden, self.latent + self.rope),
            Linear("kv_b_proj", self.latent, self.heads * (self.nope + self.value_dim)),
            Linear("o_proj", self.heads * self.value_dim, self.hidden),
        )

    @property
    def indexer(self) -> tuple[Linear, ...]:
        """The indexer's projections, which nobody trains."""
        if not self.indexes:
            return ()
        return (
            Linear("wq_b", self.query_rank, self.index_heads * self.index_dim),
            Linear("wk", self.hidden, self.index_dim),
            Linear("weights_proj", self.hidden, self.index_heads),
        )


@dataclass(frozen=True)
class Dense:
    """SwiGLU network."""

    hidden: int
    intermediate: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its projections."""
        return (
            Linear("gate_proj", self.hidden, self.intermediate),
            Linear("up_proj", self.hidden, self.intermediate),
            Linear("down_proj", self.intermediate, self.hidden),
        )


@dataclass(frozen=True)
class Experts:
    """Routed experts beside one shared network."""

    hidden: int
    intermediate: int
    experts: int
    chosen: int
    shared: Dense

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections of the shared network."""
        return self.shared.linears

    @property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        return self.experts * 3 * self.hidden * self.intermediate


Mixer = GatedDelta | FullAttention | LatentAttention
Network = Dense | Experts


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    network: Network

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All projections that LoRA may adapt, routed experts apart."""
        return (*self.mixer.linears, *self.network.linears)

    @property
    def choosing_parameters(self) -> int:
        """Weights of router, indexer and convolution."""
        total = self.mixer.channels * self.mixer.kernel if isinstance(self.mixer, GatedDelta) else 0
        if isinstance(self.mixer, LatentAttention):
            total += sum(linear.parameters for linear in self.mixer.indexer)
        if isinstance(self.network, Experts):
            total += self.network.experts * self.network.hidden
        return total

    @property
    def dense_parameters(self) -> int:
        """Weights but those of routed experts; norms and other vectors are left out."""
        return sum(linear.parameters for linear in self.linears) + self.choosing_parameters

    @property
    def expert_parameters(self) -> int:
        """Weights of routed experts."""
        return self.network.expert_parameters if isinstance(self.network, Experts) else 0


@dataclass(frozen=True)
class Architecture:
    """A causal language model."""

    family: str
    hidden: int
    vocabulary: int
    tied: bool
    positions: int
    layers: tuple[Layer, ...]

    @property
    def dense_parameters(self) -> int:
        """Weights that every rank holds: all but the routed experts; norms and other vectors are left out."""
        return self.embedding_parameters + sum(layer.dense_parameters for layer in self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Weights of embedding and head."""
        return self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def expert_parameters(self) -> int:
        """Weights of routed experts, which expert parallelism divides."""
        return sum(layer.expert_parameters for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.dense_parameters + self.expert_parameters


def read_architecture(config: Mapping[str, Any], source: str) -> Architecture:
    """Return the shape that a Hugging Face `config.json` describes.

    Raises:
        SpecError: the family is not supported, or a field is missing or not a number that a model can have.
    """
    text = cast("Mapping[str, Any]", config.get("text_config", config))
    if not isinstance(text, Mapping):  # type: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"{source}: text_config must be one JSON object")
    fields = _Fields(text, source)
    kind = text.get("model_type")
    if kind in ("qwen3_5_text", "qwen3_5"):
        return _hybrid(fields)
    if kind == "glm_moe_dsa":
        return _glm(fields)
    raise SpecError(f"{source}: model_type {kind!r} is not supported; supported are qwen3_5_text, glm_moe_dsa")


_LARGEST = (1 << 31) - 1


class _Fields:
    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self.fields, self.source = fields, source

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            raise SpecError(f"{self.source}: {name} is {value!r}: must be a whole number from {least} to {_LARGEST}")
        return value

    def kinds(self, name: str, known: tuple[str, ...], default: list[str]) -> list[str]:
        value = self.fields.get(name) or default
        layers = self.number("num_hidden_layers")
        if not isinstance(value, list) or len(value) != layers or any(kind not in known for kind in value):  # type: ignore[arg-type]
            raise SpecError(f"{self.source}: {name} must name one of {', '.join(known)} for every layer")
        return cast("list[str]", value)


def _hybrid(fields: _Fields) -> Architecture:
    n, hidden, count = fields.number, fields.number("hidden_size"), fields.number("num_hidden_layers")
    delta = GatedDelta(
        hidden=hidden,
        key_heads=n("linear_num_key_heads"),
        value_heads=n("linear_num_value_heads"),
        key_dim=n("linear_key_head_dim"),
        value_dim=n("linear_value_head_dim"),
        kernel=n("linear_conv_kernel_dim"),
    )
    attention = FullAttention(
        hidden=hidden,
        heads=n("num_attention_heads"),
        key_heads=n("num_key_value_heads"),
        head_dim=n("head_dim"),
    )
    every = n("full_attention_interval", 4, least=0)
    by_interval = ["full_attention" if every and (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    kinds = fields.kinds("layer_types", ("linear_attention", "full_attention"), by_interval)
    network = Dense(hidden, n("intermediate_size"))
    mixers: dict[str, Mixer] = {"linear_attention": delta, "full_attention": attention}
    return Architecture(
        family="qwen3_5_text",
        hidden=hidden,
        vocabulary=n("vocab_size"),
        tied=bool(fields.fields.get("tie_word_embeddings", False)),
        positions=n("max_position_embeddings"),
        layers=tuple(Layer(mixers[kind], network) for kind in kinds),
    )


def _glm(fields: _Fields) -> Architecture:
    n, hidden, count = fields.number, fields.number("hidden_size"), fields.number("num_hidden_layers")
    frequency, offset = n("index_topk_freq", 1, least=0), n("index_skip_topk_offset", 2, least=0)
    by_frequency = ["shared" if max(i - offset + 1, 0) % max(frequency, 1) else "full" for i in range(count)]
    indexers = fields.kinds("indexer_types", ("full", "shared"), by_frequency)
    leading = n("first_k_dense_replace", 0, least=0)
    networks = fields.kinds(
        "mlp_layer_types", ("dense", "sparse"), ["dense" if i < leading else "sparse" for i in range(count)]
    )
    dense = Dense(hidden, n("intermediate_size"))
    width = n("moe_intermediate_size")
    experts = Experts(
        hidden=hidden,
        intermediate=width,
        experts=n("n_routed_experts"),
        chosen=n("num_experts_per_tok"),
        shared=Dense(hidden, width * n("n_shared_experts", least=0)),
    )

    def mixer(indexes: bool) -> LatentAttention:
        return LatentAttention(
            hidden=hidden,
            heads=n("num_attention_heads"),
            query_rank=n("q_lora_rank"),
            latent=n("kv_lora_rank"),
            rope=n("qk_rope_head_dim"),
            nope=n("qk_nope_head_dim"),
            value_dim=n("v_head_dim"),
            indexes=indexes,
            index_heads=n("index_n_heads"),
            index_dim=n("index_head_dim"),
            selected=n("index_topk"),
        )

    return Architecture(
        family="glm_moe_dsa",
        hidden=hidden,
        vocabulary=n("vocab_size"),
        tied=bool(fields.fields.get("tie_word_embeddings", False)),
        positions=n("max_position_embeddings"),
        layers=tuple(
            Layer(mixer(indexer == "full"), dense if network == "dense" else experts)
            for indexer, network in zip(indexers, networks, strict=True)
        ),
    )

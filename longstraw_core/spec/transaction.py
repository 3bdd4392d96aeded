"""The transaction specification: everything a run needs to know, in one frozen YAML-able model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longstraw_core.spec.cluster import ClusterSpec
from longstraw_core.spec.model import Count, FiniteFloat, PathText, PositiveCount, Sha256, StrictModel
from longstraw_core.spec.policy import PolicyName
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.spec.receipts import GradientMode

Family = Literal["qwen3_5_text", "glm_moe_dsa"]
Policy = Literal["fail", "drop", "keep"]
"""What happens to the rows that have a certain problem."""
BaseWeights = Literal["replicated", "sharded"]
"""Where the frozen matrices of decoder layers are."""
SelectionRecord = Literal["cut", "positions"]
"""What capture keeps of the tokens that sparse attention selected."""
TargetPreset = Literal["attention", "attention+mlp", "all"]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0.0)]
UnitFloat = Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)]
Port = Annotated[int, Field(strict=True, ge=1024, le=65500)]
LOWEST_SERVER_TEMPERATURE = 1e-3
"""SGLang takes the most likely token below 1e-6; the margin keeps logits / temperature within fp32."""


class ModelSpec(StrictModel):
    """The frozen base model."""

    snapshot: PathText
    """Directory of a Hugging Face snapshot; relative to the specification file."""
    digest: Sha256 | None = None
    """Expected digest of the snapshot's tree manifest; checked before anything is loaded."""
    family: Family
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantization: Literal["nf4"] | None = None
    """How capture_prefix, old_logprobs and train keep the decoder layers' frozen matrices: `nf4` in four bits, by
    bitsandbytes, computing in `dtype`. The sampler keeps `dtype`. Routers, indexers, embedding and head stay as they
    are."""
    rope_scaling: YarnScaling | None = None
    """More positions than the model was trained for, for sampler and trainer alike; None changes nothing."""


class LoraSpec(StrictModel):
    """The adapter that is trained."""

    rank: Annotated[int, Field(strict=True, ge=1, le=512)] = 16
    alpha: PositiveFloat = 32.0
    targets: TargetPreset | Annotated[tuple[str, ...], Field(min_length=1)] = "all"
    """A preset of the family, or module names such as `q_proj`."""


class DataSpec(StrictModel):
    """Where prompts come from."""

    path: PathText
    """JSONL or Parquet file of DAPO-style rows; relative to the specification file."""
    prompts_per_transaction: PositiveCount = 1
    max_prompt_tokens: PositiveCount | None = None
    """Longest prompt accepted after the chat template; None means what the model's positions allow."""
    duplicates: Literal["fail", "drop", "keep"] = "drop"
    """What to do with rows that repeat an earlier prompt with the same ground truth. As for all policies below:
    `fail` refuses the file and names the rows, `drop` leaves the rows out and counts them, `keep` uses and counts them.
    A policy without `keep` is about rows that nobody could train on."""
    conflicting_truths: Policy = "fail"
    """Prompts that occur with different ground truths; `drop` leaves out every row of such a prompt, `keep` makes
    each different ground truth a row of its own."""
    bad_truths: Literal["fail", "drop"] = "fail"
    """Ground truths that are empty or that the scorer cannot read."""
    too_long_prompts: Literal["fail", "drop"] = "fail"
    """Prompts longer than the limit after the chat template."""
    wrong_types: Literal["fail", "drop"] = "fail"
    """Rows that are not JSON, and fields that are missing or of the wrong type."""
    control_characters: Policy = "fail"
    """Control characters other than tab and line ends in prompts, ground truths and sources."""
    shuffle: bool = True


class ServerSpec(StrictModel):
    """The SGLang server of `sampling.engine: sglang`; started for one stage and gone when the stage ends."""

    tensor_parallel: PositiveCount = 1
    pipeline_parallel: PositiveCount = 1
    nodes: PositiveCount = 1
    """Machines (pods) that share the ranks evenly; rank 0 answers, the others follow it."""
    context_length: PositiveCount | None = None
    """Tokens of prompt and response together that are served; None means all positions of the model."""
    memory_fraction: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] | None = None
    """Share of a GPU's memory for weights and cache; None leaves it to SGLang."""
    cache_tokens: PositiveCount | None = None
    """Tokens that the key-value cache holds over all requests; None means what the memory allows."""
    running_requests: PositiveCount | None = None
    """Requests that are decoded at once; None leaves it to SGLang."""
    merge: bool = False
    """Serve the base with the adapter merged into it, instead of both: for targets that SGLang cannot adapt."""
    deterministic: bool = True
    """Sampling with one seed per response; without it the server ignores seeds, and a run cannot be repeated."""
    arguments: tuple[Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")], ...] = ()
    """Further arguments of `sglang.launch_server`, one word each, for instance `--attention-backend`, `fa3`."""
    port: Port | None = None
    """Where rank 0 answers; None means a free port, or 30000 where nodes are machines of their own."""
    rendezvous_port: Port | None = None
    """Where the ranks of several nodes meet, and eleven ports after it; None like `port`, or 20000."""
    start_timeout_seconds: PositiveFloat = 3600.0
    """Longest time from launch until the server answers."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> "ServerSpec":
        ranks = self.tensor_parallel * self.pipeline_parallel
        if ranks % self.nodes:
            raise ValueError(
                f"{ranks} ranks (tensor_parallel × pipeline_parallel) do not divide over {self.nodes} nodes"
            )
        return self


class FaithfulnessSpec(StrictModel):
    """How far the trainer's log-probabilities of sampled responses may be from the sampler's before a stage fails."""

    share: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the responses that is compared; at least one of every prompt."""
    mean_limit: PositiveFloat = 0.05
    """Largest mean |Δ log-prob| over the compared tokens, in nats."""
    max_limit: PositiveFloat | None = None
    """Largest |Δ log-prob| of any token, in nats; None leaves single tokens unjudged."""


class SamplingSpec(StrictModel):
    """How responses are sampled."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """`transformers`: `generate` in the stage's own process; `sglang`: a server that the stage starts and stops."""
    group_size: PositiveCount = 8
    temperature: PositiveFloat = 1.0
    max_response_tokens: PositiveCount = 1024
    max_total_tokens: PositiveCount | None = None
    """Most response tokens of one transaction; a stage that would need more fails and keeps its finished groups."""
    concurrent_requests: Annotated[int, Field(strict=True, ge=1, le=4096)] = 64
    """Responses asked for at once (`sglang`)."""
    request_timeout_seconds: PositiveFloat = 7200.0
    """Longest time for one response (`sglang`); what was sampled until then is kept as an aborted response."""
    timeout_seconds: PositiveFloat = 86400.0
    """Longest time for the sampling of one transaction."""
    faithfulness: FaithfulnessSpec = FaithfulnessSpec()
    server: ServerSpec = ServerSpec()

    @model_validator(mode="after")
    def _server_belongs_to_sglang(self) -> "SamplingSpec":
        if self.engine != "sglang" and self.server != ServerSpec():
            raise ValueError(f"server is only for engine sglang, and engine is {self.engine}")
        if self.engine == "sglang" and self.temperature < LOWEST_SERVER_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature} is below {LOWEST_SERVER_TEMPERATURE}, where SGLang samples "
                "greedily: a group would be one response many times"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.max_response_tokens:
            raise ValueError("max_total_tokens must not be below max_response_tokens")
        return self


class RewardSpec(StrictModel):
    """How responses are scored."""

    kind: Literal["dapo_math", "math_verify", "python"] = "dapo_math"
    """`dapo_math`: the published rule, bit for bit; `math_verify`: mathematical equality; `python`: your function."""
    variant: Literal["label", "strict_box"] = "label"
    """Of `dapo_math`. `label`: the last `Answer:` line of the last 300 characters; `strict_box`: the last `\\boxed{}`
    of the last 100, exact text."""
    answer_format: Literal["any", "label", "box"] = "any"
    """Of `math_verify`: what states the answer. `any`: the last labelled or boxed value, or a text that is nothing but
    a value; `label`: `Answer:` only; `box`: `\\boxed{}` only."""
    truncated: Literal["score", "no_answer"] = "score"
    """What a response that reached the length limit gets: scored like any other, or −1 with status `no_answer`."""
    function: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")] | None = None
    """Of `python`: `package.module:function`, importable where the stage runs."""
    timeout_seconds: PositiveFloat = 3.0
    """Longest time for one comparison of `math_verify` or one call of `function`, from the start of work."""
    overlong_max_tokens: PositiveCount | None = None
    """Length at which the soft overlong punishment reaches −1; None switches it off."""
    overlong_cache_tokens: PositiveCount | None = None
    """Width of the linear part before `overlong_max_tokens`."""

    @model_validator(mode="after")
    def _function_belongs_to_python(self) -> "RewardSpec":
        if self.kind == "python" and self.function is None:
            raise ValueError("kind python needs reward.function, for instance my_rewards.length:score")
        if self.kind != "python" and self.function is not None:
            raise ValueError(f"function is only for kind python, and kind is {self.kind}")
        return self

    @model_validator(mode="after")
    def _overlong_complete(self) -> "RewardSpec":
        if (self.overlong_max_tokens is None) != (self.overlong_cache_tokens is None):
            raise ValueError("overlong_max_tokens and overlong_cache_tokens are set together or not at all")
        if (self.overlong_cache_tokens or 0) > (self.overlong_max_tokens or 0):
            raise ValueError("overlong_cache_tokens must not exceed overlong_max_tokens")
        return self


class ObjectiveSpec(StrictModel):
    """The GRPO objective."""

    gradient: GradientMode = "exact"
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    clip_low: UnitFloat = 0.2
    clip_high: Annotated[FiniteFloat, Field(ge=0.0)] = 0.28
    normalize_advantages: bool = True
    """Divide by the group's standard deviation (GRPO) or not (Dr. GRPO)."""
    kl_coefficient: Annotated[FiniteFloat, Field(ge=0.0)] = 0.0
    """Weight of the KL term against the reference (the same model with the adapter disabled)."""
    importance_cap: PositiveFloat | None = 2.0
    """Upper bound of the per-token weight exp(old log-prob − sampler log-prob); None leaves it out."""
    mask_truncated: bool = True
    """Leave truncated responses out of the loss, in numerator and denominator."""


class OptimizerSpec(StrictModel):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-5
    beta1: UnitFloat = 0.9
    beta2: UnitFloat = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: Annotated[FiniteFloat, Field(ge=0.0)] = 0.0
    max_gradient_norm: PositiveFloat | None = 1.0
    warmup_steps: Count = 0


class LayoutSpec(StrictModel):
    """How the work is laid out over ranks and time."""

    context_parallel: Annotated[int, Field(strict=True, ge=1, le=4096)] = 1
    """Ranks that capture_prefix, old_logprobs and train run on; every token belongs to one of them."""
    expert_parallel: Annotated[int, Field(strict=True, ge=1, le=4096)] = 1
    """Ranks that share one set of experts; they are the same ranks."""
    base_weights: BaseWeights = "replicated"
    """Where the decoder layers' frozen matrices are: whole on every context-parallel rank, or an equal share on each,
    gathered layer by layer on use. Routed experts are divided by `expert_parallel` when that is above 1."""
    rank_timeout_seconds: PositiveCount = 40
    """How long a rank waits for the others in one exchange before the stage is ended."""
    prompt_chunk_tokens: PositiveCount = 2048
    """Prompt tokens captured, or swept with autograd, at once; bounds the live graph."""
    page_tokens: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] = 256
    """Tokens per resident page."""
    checkpoint_layers: bool = False
    """Keep only layer inputs of a replayed response or swept chunk and recompute each layer in its backward."""
    selection_record: SelectionRecord = "cut"
    """Sparse attention in `exact` mode: keep where each selection is cut and score again in the reverse sweep, or keep
    every selected position (2 or 4 bytes each), which a sweep on another kind of device needs."""

    @model_validator(mode="after")
    def _experts_fold_onto_the_ranks(self) -> "LayoutSpec":
        if self.context_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} does not divide context_parallel {self.context_parallel}; "
                "experts are sharded over the same ranks as tokens"
            )
        return self


class PrefixSpec(StrictModel):
    """How captured prompt state gets from capture_prefix to old_logprobs and train."""

    handoff: Literal["store", "recapture"] = "store"
    """`store`: as files in the artifact store; `recapture`: every stage captures the prompts again."""
    max_stale_steps: Count = 0
    """Optimizer steps that a state captured with the adapter on may be behind. 0 captures anew after every step. In
    `response_adapter` mode a state is never stale and this changes nothing."""


class ScheduleSpec(StrictModel):
    """How many transactions a run chains and which stages may overlap."""

    transactions: Annotated[int, Field(strict=True, ge=1, le=100)] = 1
    exclusive_gpus: bool = True
    """Capture waits for sampling, so that the two never hold the same GPUs."""


class StorageSpec(StrictModel):
    """Where artifacts are kept. How an S3 server is reached and signed in to is the environment's matter."""

    uri: Annotated[
        str,
        Field(
            pattern=r"^(file://[^\x00-\x1f\x7f]+|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?)$",
            max_length=4096,
        ),
    ] = "file://./longstraw-store"
    """`file://…` (relative to the specification file) or `s3://bucket/prefix`."""
    policy: PolicyName | None = None
    """Policy whose `current` pointer every validated checkpoint moves; None moves none."""


class TransactionSpec(StrictModel):
    """One GRPO transaction: the unit that a run executes one or more times."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?$")]
    """Name of the run; lower-case letters, digits and hyphens, at most 50."""
    seed: Count = 0
    model: ModelSpec
    lora: LoraSpec = LoraSpec()
    data: DataSpec
    sampling: SamplingSpec = SamplingSpec()
    reward: RewardSpec = RewardSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    layout: LayoutSpec = LayoutSpec()
    prefix: PrefixSpec = PrefixSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    storage: StorageSpec = StorageSpec()
    cluster: ClusterSpec = ClusterSpec()

    @model_validator(mode="after")
    def _engine_can_leave_the_adapter_off(self) -> "TransactionSpec":
        if self.sampling.engine == "sglang" and self.objective.gradient == "response_adapter":
            raise ValueError(
                "objective.gradient response_adapter samples with the adapter off on the prompt, which SGLang cannot "
                "do: an adapter acts on a whole request; use sampling.engine transformers, or another gradient mode"
            )
        return self

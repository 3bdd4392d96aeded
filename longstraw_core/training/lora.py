"""LoRA adapters in PEFT's format: a fresh seeded one, byte-deterministic saving, and loading that refuses by name."""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import peft.utils.transformers_weight_conversion as peft_conversion
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from longstraw_core.mixers.exchange.expert_shard import is_expert_parameter, shard_of_lora
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.spec.errors import IntegrityError, SpecError
from longstraw_core.spec.transaction import LoraSpec

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER = "default"

ATTENTION = (
    "in_proj_a",
    "in_proj_b",
    "in_proj_qkv",
    "in_proj_z",
    "k_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "out_proj",
    "q_a_proj",
    "q_b_proj",
    "q_proj",
    "v_proj",
)
MLP = ("down_proj", "gate_proj", "up_proj")
EXPERTS = ("experts.down_proj", "experts.gate_up_proj")
PRESETS = {"attention": ATTENTION, "attention+mlp": ATTENTION + MLP, "all": ATTENTION + MLP + EXPERTS}
"""Names of each preset over all families; a model takes those it has. `MLP` are dense and shared-expert networks,
`EXPERTS` the fused parameters of the routed experts."""
_PLAIN_FIELDS = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "target_parameters",
    "task_type",
}
"""Fields of a plain adapter's configuration; any other one that is set makes it compute something else than
x W^T + alpha / r x A^T B^T, or on other modules."""
_PLAIN_STARTS = (True, False, "eva", "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is."""
_MAX_RANK = 512
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NEVER_TRAINED = {
    "wq_b": "the indexer chooses without a gradient",
    "wk": "the indexer chooses without a gradient",
    "weights_proj": "the indexer chooses without a gradient",
    "gate": "the router is frozen, so that recorded choices stay valid",
}


def target_names(base_model: nn.Module, lora: LoraSpec) -> tuple[str, ...]:
    """Return the names asked for, sorted: linear modules, and `experts.*` for parameters of the routed experts.

    Raises:
        SpecError: a name is never trained, or the decoder layers have nothing of that name; lists what exists.
    """
    available = sorted({name.rsplit(".", 1)[-1] for name in _linear_names(base_model)} | _expert_targets(base_model))
    if isinstance(lora.targets, str):
        return tuple(sorted(name for name in PRESETS[lora.targets] if name in available))
    for name in lora.targets:
        if name in NEVER_TRAINED and any(path.endswith(f".{name}") for path, _ in base_model.named_modules()):
            raise SpecError(f"lora.targets: {name!r} is never trained: {NEVER_TRAINED[name]}")
        if name not in available:
            raise SpecError(f"lora.targets: no module is called {name!r}; this model has {', '.join(available)}")
    return tuple(sorted(set(lora.targets)))


def _linear_names(base_model: nn.Module) -> set[str]:
    """Full names of the decoder layers' linear modules that can be trained."""
    return {
        name
        for name, module in base_model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and not {"visual", "indexer"} & set(name.split("."))
    }


def _expert_parameters(base_model: nn.Module) -> set[str]:
    """Full names of the routed experts' fused parameters."""
    return {
        name
        for name, _ in base_model.named_parameters()
        if ".layers." in name and ".".join(name.rsplit(".", 2)[-2:]) in EXPERTS
    }


def _expert_targets(base_model: nn.Module) -> set[str]:
    return {".".join(name.rsplit(".", 2)[-2:]) for name in _expert_parameters(base_model)}


def inject_adapter(base_model: nn.Module, lora: LoraSpec, *, seed: int) -> PeftModel:
    """Wrap the target modules with a fresh adapter (A Kaiming-uniform, B zero) drawn from `seed`.

    The base is frozen; adapter weights are fp32 whatever the base's dtype is. The random generators of the process
    are left as they were.

    Raises:
        SpecError: an unknown target, or PEFT wrapped other modules than were asked for.
    """
    targets = target_names(base_model, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _wrap(base_model, targets, rank=lora.rank, alpha=lora.alpha)


def _wrap(base_model: nn.Module, targets: tuple[str, ...], *, rank: int, alpha: float) -> PeftModel:
    modules = {name for name in _linear_names(base_model) if name.rsplit(".", 1)[-1] in targets}
    parameters = {name for name in _expert_parameters(base_model) if ".".join(name.rsplit(".", 2)[-2:]) in targets}
    base_model.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT divides it by r; a float is meant to work
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=sorted(modules),
        target_parameters=sorted(parameters) or None,
    )
    with warnings.catch_warnings(), _targets_as_asked():
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(base_model, config)  # type: ignore[arg-type]
    wrapped = {
        _wrapped_name(name.removeprefix("base_model.model."), module)
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }
    expected = modules | parameters
    if wrapped != expected:
        raise SpecError(f"PEFT wrapped other modules than lora.targets asks for: {sorted(wrapped ^ expected)}")
    config.target_modules = [name for name in targets if name not in EXPERTS]
    config.target_parameters = [f"mlp.{name}" for name in targets if name in EXPERTS] or None
    model.eval()
    return cast(PeftModel, model)


def _wrapped_name(name: str, module: nn.Module) -> str:
    """Name of what a PEFT layer adapts; wrappers of several parameters of one module are nested."""
    if not hasattr(module, "parameter_name"):
        return name
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return f"{name}.{module.parameter_name}"


@contextlib.contextmanager
def _targets_as_asked() -> Iterator[None]:
    """Keep PEFT 0.21 from rewriting gate/up/down_proj of mixture models into the fused parameters of all experts."""
    rewrite = peft_conversion._convert_peft_config_moe
    peft_conversion._convert_peft_config_moe = lambda peft_config, model: None
    try:
        yield
    finally:
        peft_conversion._convert_peft_config_moe = rewrite


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by PEFT's state-dict names (`base_model.model…lora_A.weight`), sorted."""
    named = {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return dict(sorted(named.items()))


def _config_json(model: PeftModel) -> bytes:
    """PEFT's adapter_config.json with sorted lists and keys, and without the path of the base model."""
    fields = model.peft_config[ADAPTER].to_dict()
    fields["base_model_name_or_path"] = None
    fields["inference_mode"] = True
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
    return (json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()


def expert_count(model: PeftModel) -> int:
    """Routed experts of the base model, of all ranks; 0 when it has none."""
    return int(getattr(model.get_base_model().config, "n_routed_experts", 0) or 0)


def holds_expert_shard(model: PeftModel) -> bool:
    """Whether the base model holds only some of its routed experts."""
    count = expert_count(model)
    held = {
        parameter.shape[0]
        for name, parameter in model.named_parameters()
        if is_expert_parameter(name) and "lora_" not in name
    }
    return any(share < count for share in held)


def save_adapter(model: PeftModel, directory: Path, *, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors; equal adapters give equal bytes.

    Args:
        model: gives the configuration, and the tensors unless they are given.
        directory: new or empty.
        tensors: all tensors by PEFT's names, when the model holds only a part of the experts'.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, torch.Tensor] = dict(trainable_parameters(model)) if tensors is None else tensors
    written = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
    save_file(written, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (directory / CONFIG_NAME).write_bytes(_config_json(model))


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: no readable adapter configuration: {error}") from error
    if not isinstance(fields, dict):
        raise SpecError(f"{path}: no readable adapter configuration: it must be a JSON object")
    if fields.get("peft_type") != "LORA":
        raise SpecError(f"{path}: peft_type is {fields.get('peft_type')!r}, only LORA adapters are supported")
    if fields.get("lora_dropout", 0.0) or fields.get("bias", "none") != "none":
        raise SpecError(f"{path}: lora_dropout must be 0 and bias must be 'none'")
    for key in sorted(key for key, value in fields.items() if value and key not in _PLAIN_FIELDS):
        raise SpecError(f"{path}: {key} is not supported")
    start = fields.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise SpecError(f"{path}: init_lora_weights {start!r} changes the base model's weights, which is not supported")
    targets = fields.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise SpecError(f"{path}: target_modules must be a list of module names")
    known = [f"mlp.{name}" for name in EXPERTS]
    parameters = fields.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(name in known for name in parameters):
        raise SpecError(f"{path}: target_parameters must be a list of {', '.join(known)}")
    if not targets and not parameters:
        raise SpecError(f"{path}: target_modules must be a list of module names")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= _MAX_RANK:
        raise SpecError(f"{path}: r is {_shown(rank)}, it must be a whole number from 1 to {_MAX_RANK}")
    finite = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0.0 < alpha <= sys.float_info.max
    if not finite:
        raise SpecError(f"{path}: lora_alpha is {_shown(alpha)}, it must be a positive finite number")
    return fields


def _shown(value: object) -> str:
    return f"{value!r:.40}"


def load_adapter(
    base_model: nn.Module, directory: Path, *, expected: LoraSpec | None = None, held: RankGroup = ALONE
) -> PeftModel:
    """Wrap `base_model` with a stored adapter.

    Args:
        held: the ranks that share the experts, when the model holds only this rank's.
        expected: when given, rank, alpha and targets must equal it.

    Raises:
        SpecError: the configuration is unsupported, differs from `expected`, or a tensor is missing, unexpected,
            empty or of another shape or rank than this model needs; names it.
        IntegrityError: the weights are not a safetensors file.
    """
    fields = _read_config(directory)
    experts = [name.removeprefix("mlp.") for name in fields.get("target_parameters") or []]
    targets = tuple(sorted([*fields["target_modules"], *experts]))
    asked = LoraSpec(rank=fields["r"], alpha=float(fields["lora_alpha"]), targets=targets)
    if expected is not None:
        wanted = (expected.rank, expected.alpha, target_names(base_model, expected))
        if (asked.rank, asked.alpha, targets) != wanted:
            raise SpecError(
                f"{directory}: adapter has rank {asked.rank}, alpha {asked.alpha:g}, targets {', '.join(targets)}; "
                f"asked for are rank {wanted[0]}, alpha {wanted[1]:g}, targets {', '.join(wanted[2])}"
            )
    _tensor_shapes(directory / WEIGHTS_NAME)
    model = inject_adapter(base_model, asked, seed=0)
    load_adapter_tensors(model, directory, experts=held if holds_expert_shard(model) else ALONE)
    return model


def load_adapter_tensors(model: PeftModel, directory: Path, *, experts: RankGroup = ALONE) -> None:
    """Copy stored weights into an adapter that is already injected; of experts, those that this rank holds.

    Raises:
        SpecError: a tensor is missing, unexpected, not floating point, or of another shape or rank than this model
            needs; names it.
        IntegrityError: the weights are not a safetensors file, or not finite.
    """
    path = directory / WEIGHTS_NAME
    shapes = _tensor_shapes(path)
    parameters = trainable_parameters(model)
    for name in sorted(set(parameters) - set(shapes)):
        raise SpecError(f"{path}: tensor {name} is missing")
    for name in sorted(set(shapes) - set(parameters)):
        raise SpecError(f"{path}: tensor {name} belongs to no module of this model")
    count = expert_count(model)
    for name, parameter in parameters.items():
        needed = _stored_shape(name, parameter, experts)
        if shapes[name] != needed:
            raise SpecError(f"{path}: tensor {name} has shape {shapes[name]}, this model needs {needed}")
    for name in parameters:
        tensor = _tensor(path, name)
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise SpecError(f"{path}: tensor {name} is stored as {tensor.dtype}, weights must be floating point")
        if not torch.isfinite(tensor).all():
            raise IntegrityError(f"{path}: tensor {name} contains values that are not finite")
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = _tensor(path, name)
            sharded = experts.size > 1 and is_expert_parameter(name)
            parameter.copy_(shard_of_lora(name, tensor, count, experts) if sharded else tensor)


def _tensor(path: Path, name: str) -> torch.Tensor:
    """Read one tensor: a rank that holds a part of the experts' adapters never has all of them in memory."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _stored_shape(name: str, parameter: torch.Tensor, experts: RankGroup) -> tuple[int, ...]:
    """Shape in a file, which holds all experts, of what this rank holds a part of."""
    rows, columns = parameter.shape
    if experts.size == 1 or not is_expert_parameter(name):
        return (rows, columns)
    return (rows * experts.size, columns) if ".lora_A." in name else (rows, columns * experts.size)


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}: not a readable safetensors file: {error}") from error
